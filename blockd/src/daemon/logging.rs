//! Logs, to standard error.

use std::io::IsTerminal;

use blockd_media::error::Error;
use tracing_subscriber::EnvFilter;

use crate::config::LogConfig;

/// libublk says at this level what we say in our own words.
const QUIET: &str = "libublk=warn";

/// Begins to log. Once in a process.
pub(super) fn start(config: &LogConfig) -> Result<(), Error> {
    let filter = EnvFilter::try_new(&config.filter)
        .map_err(|error| Error::invalid("log.level", &config.filter, error))?;
    let filter = match QUIET.parse() {
        Ok(quiet) if !config.filter.contains("libublk") => filter.add_directive(quiet),
        _ => filter,
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if config.json {
        builder.json().flatten_event(true).try_init()
    } else if std::env::var_os("JOURNAL_STREAM").is_some() {
        // The journal has times of its own.
        builder.with_ansi(false).without_time().with_target(false).try_init()
    } else {
        let colours = std::io::stderr().is_terminal();
        builder.with_ansi(colours).with_target(false).try_init()
    };
    started.map_err(|error| Error::Unexpected {
        what: "start logging".to_owned(),
        problem: error.to_string(),
    })
}
