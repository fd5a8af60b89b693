//! Regions by the kernel's tool, and by the daemon's command line.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workload::guest::shell;

/// Writes labels to memory that never had any: done once in the life of a module.
///
/// # Errors
/// When the kernel's tool fails, or does not find `regions` of them.
pub(super) fn labels(regions: usize) -> Result<()> {
    shell("ndctl disable-region all; ndctl init-labels -f all; ndctl enable-region all")?;
    let found = kernels("-R")?;
    ensure!(found.len() == regions, "{} regions: {found:?}", found.len());
    Ok(())
}

/// The list of the kernel's own tool.
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
        // With namespaces in them, regions are listed as part of a platform.
        Value::Object(one) => match one.get("regions") {
            Some(Value::Array(all)) => all.clone(),
            _ => vec![Value::Object(one)],
        },
        other => vec![other],
    })
}

/// The answer of our command line.
///
/// # Errors
/// When it fails, or prints no JSON.
pub(super) fn blockd(words: &str) -> Result<Value> {
    let text = shell(&format!("$BLOCKD_BIN --json pmem {words}"))?;
    serde_json::from_str(&text).with_context(|| text.clone())
}

/// The regions that our command line lists.
///
/// # Errors
/// When it fails, or prints no regions.
pub(super) fn ours() -> Result<Vec<Value>> {
    let value = blockd("list")?;
    let regions = value["regions"].as_array().cloned();
    regions.with_context(|| format!("no regions: {value}"))
}

/// Both lists agree: on size, what is free, and which processors are near. Gives the keys of the
/// larger and of the smaller region.
///
/// # Errors
/// When they do not.
pub(super) fn compare() -> Result<[String; 2]> {
    let mut ours = ours()?;
    ours.sort_by_key(|one| std::cmp::Reverse(one["size_bytes"].as_u64()));
    let theirs = kernels("-R -v")?;
    ensure!(ours.len() == theirs.len(), "ours: {ours:?}\ntheirs: {theirs:?}");
    for region in &ours {
        let name = &region["name"];
        let other = theirs.iter().find(|one| one["dev"] == *name);
        let other = other.with_context(|| format!("{name} is only ours"))?;
        for (mine, its) in [
            ("size_bytes", "size"),
            ("available_bytes", "available_size"),
            ("largest_available_bytes", "max_available_extent"),
            ("numa_node", "numa_node"),
            ("persistence_domain", "persistence_domain"),
            ("align_bytes", "align"),
        ] {
            ensure!(region[mine] == other[its], "{name}: {mine} in {region}, {its} in {other}");
        }
    }
    let nodes: Vec<_> = ours.iter().map(|one| one["numa_node"].as_u64()).collect();
    ensure!(nodes == [Some(0), Some(1)], "regions near {nodes:?}");
    let key = |at: usize| ours[at]["region"].as_str().map(str::to_owned);
    let keys = (key(0).context("no key")?, key(1).context("no key")?);
    ensure!(keys.0 != keys.1, "two regions with one key: {keys:?}");
    Ok([keys.0, keys.1])
}
