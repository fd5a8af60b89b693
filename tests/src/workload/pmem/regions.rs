//! Regions as the kernel has them, and as the daemon's command line tells of them.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workload::guest::shell;

/// Writes labels to memory that never had any: done once in the life of a module.
///
/// # Errors
/// When the kernel's tool fails, or does not find two regions.
pub(super) fn labels() -> Result<()> {
    shell("ndctl disable-region all; ndctl init-labels -f all; ndctl enable-region all")?;
    let found = kernels("-R")?;
    ensure!(found.len() == 2, "{} regions: {found:?}", found.len());
    Ok(())
}

/// What the kernel's own tool lists.
///
/// # Errors
/// When it fails, or prints no list.
pub(super) fn kernels(what: &str) -> Result<Vec<Value>> {
    let text = shell(&format!("ndctl list {what}"))?;
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let value: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    Ok(match value {
        Value::Array(all) => all,
        one => vec![one],
    })
}
