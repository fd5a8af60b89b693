//! Logs, to standard error.

use blockd_csi_base::options::LogFormat;
use tracing_subscriber::EnvFilter;

use crate::error::Error;

/// The environment variable with the log filter, in the form of `tracing`.
const VARIABLE: &str = "BLOCKD_CSI_LOG";

/// Begins to log. Once in a process.
///
/// # Errors
/// The log filter cannot be parsed.
pub fn start(format: LogFormat) -> Result<(), Error> {
    let wanted = std::env::var(VARIABLE).unwrap_or_else(|_| "info".to_owned());
    let filter =
        EnvFilter::try_new(&wanted).map_err(|error| Error::invalid(VARIABLE, &wanted, error))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false);
    let started = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| Error::unexpected("start logging:", error))
}
