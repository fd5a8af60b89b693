//! Memory that the kernel takes for persistent at a word of its command line: regions without
//! labels and without a platform that states their persistence.

use anyhow::{Context, Result, ensure};

use super::{pooled, regions};

/// Two pieces, one for each way of use.
pub(super) const WORDS: &str = "memmap=256M!1G memmap=128M!1536M";

/// The guest's half.
///
/// # Errors
/// When something is not as it has to be.
pub(super) fn inside() -> Result<String> {
    let regions = regions::ours()?;
    ensure!(regions.len() == 2, "{regions:?}");
    let large = regions.iter().max_by_key(|one| one["size_bytes"].as_u64()).context("no region")?;
    ensure!(large["labelled"] == false && large["persistence_domain"] == "unknown", "{large}");
    let key = large["region"].as_str().context("a region without a key")?;
    let said = regions::blockd(&format!("adopt {key} --dry-run"))?;
    ensure!(said["changed"] == false && regions::ours()? == regions, "a dry run: {said}");
    let said = regions::blockd(&format!("adopt {key}"))?;
    ensure!(said["changed"] == true && said["namespace"]["mode"] == "devdax", "{said}");
    let mut daemon = pooled::daemon("", "")?;
    let pool = &daemon.cli(&["pool", "show", "default"])?["pool"];
    // The platform states no persistence, so the pool promises none.
    ensure!(pool["durability"] == "restart-safe", "{pool}");
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    let mut daemon = pooled::daemon("persistence = \"power-safe\"\n", "")?;
    let pool = &daemon.cli(&["pool", "show", "default"])?["pool"];
    ensure!(pool["durability"] == "power-safe" && pool["write_cache"] == false, "{pool}");
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    Ok("a region without labels adopted".to_owned())
}
