//! `blockd config`: says whether a file is right, and what comes of it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use blockd_cli::ConfigReport;
use blockd_media::error::Error;
use blockd_media::place::Places;

use super::{Config, ListenAddress, parse, surroundings};

/// Reads a file; without one, that at the usual place; without that, nothing.
fn read(path: Option<&Path>) -> Result<(Option<PathBuf>, String), Error> {
    let usual = Places::of_process().config_file();
    let path = path.map(Path::to_path_buf).or_else(|| usual.exists().then_some(usual));
    let Some(path) = path else { return Ok((None, String::new())) };
    let text = std::fs::read_to_string(&path)
        .map_err(|error| Error::file("read the configuration", &path, error))?;
    Ok((Some(path), text))
}

/// Checks a file, with the files and devices that it names, and says what a daemon would do with
/// it, in lines or as JSON. Touches nothing.
pub fn check(path: Option<&Path>, json: bool) -> Result<ConfigReport, Error> {
    let (path, text) = read(path)?;
    let (config, mut errors) = parse::mistakes(&text, path.as_deref(), &Places::of_process());
    let mut warnings = Vec::new();
    if let Some(config) = &config {
        let found = surroundings::check(config);
        errors.extend(found.errors);
        warnings = found.warnings;
    }
    let source = path.as_ref().map(|path| path.display().to_string());
    let text = match config.filter(|_| errors.is_empty()) {
        Some(config) => summary(&config, source, &warnings, json)?,
        None if json => invalid(source, &errors, &warnings),
        None => String::new(),
    };
    Ok(ConfigReport { text, errors, warnings })
}

fn invalid(source: Option<String>, errors: &[Error], warnings: &[String]) -> String {
    let errors: Vec<_> = errors
        .iter()
        .map(|error| {
            let detail = error.detail();
            serde_json::json!({
                "code": error.exit_code(),
                "kind": error.kind().row().name,
                "field": detail.field,
                "value": detail.value,
                "allowed": detail.allowed,
                "message": detail.message,
            })
        })
        .collect();
    let answer = serde_json::json!({
        "valid": false,
        "config": source,
        "error": errors.first(),
        "errors": errors,
        "warnings": warnings,
    });
    format!("{answer:#}\n")
}

fn summary(
    config: &Config,
    source: Option<String>,
    warnings: &[String],
    json: bool,
) -> Result<String, Error> {
    let listeners: Vec<String> = config
        .nbd
        .listeners
        .iter()
        .map(|listener| match &listener.address {
            ListenAddress::Unix { path, .. } => path.display().to_string(),
            ListenAddress::Tcp(address) => address.to_string(),
        })
        .collect();
    let direct = config.direct_pools.iter().map(|pool| pool.name.as_str());
    let pools = config.pools.iter().map(|pool| pool.name.as_str());
    let pools: Vec<&str> = pools.chain(direct).collect();
    if json {
        let answer = serde_json::json!({
            "valid": true,
            "config": source,
            "control_socket": config.control_socket,
            "pools": pools,
            "default_pool": config.default_pool,
            "nbd": listeners,
            "metrics": config.metrics.map(|address| address.to_string()),
            "errors": [],
            "warnings": warnings,
        });
        return Ok(format!("{answer:#}\n"));
    }
    let mut lines = String::new();
    let source = source.unwrap_or_else(|| "no file, the defaults".to_owned());
    let metrics = config.metrics.map_or_else(|| "off".to_owned(), |address| address.to_string());
    let rows = [
        ("configuration", source),
        ("control socket", config.control_socket.display().to_string()),
        ("pools", format!("{} (default: {})", pools.join(", "), config.default_pool)),
        ("nbd", listeners.join(", ")),
        ("metrics", metrics),
    ];
    for (name, value) in rows {
        writeln!(lines, "{name:<15} {value}").map_err(unwritable)?;
    }
    Ok(lines)
}

/// The configuration with all defaults filled in, as a file or as JSON.
pub fn show(path: Option<&Path>, json: bool) -> Result<String, Error> {
    let (path, text) = read(path)?;
    let file = parse::complete(&text, path.as_deref(), &Places::of_process())?;
    if json {
        return serde_json::to_string_pretty(&file).map(|text| text + "\n").map_err(unwritable);
    }
    toml::to_string(&file).map_err(unwritable)
}

fn unwritable(error: impl std::fmt::Display) -> Error {
    Error::Unexpected { what: "show the configuration".to_owned(), problem: error.to_string() }
}
