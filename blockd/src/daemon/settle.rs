//! Waits for persistent memory. While a host boots its regions and namespaces come one by one, and
//! large ones late: the kernel has something to write down for each of their pages.

use std::path::Path;
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_media::pool::namespace_of_path;
use blockd_pmem::platform::{Inventory, Platform, RegionKey, pooled};

use crate::config::Config;

/// How long it is waited for. The kernel writes some 100 GB of pages down in a second; a namespace
/// that is not there by then is disabled or gone, and its pool reports it.
const LIMIT: Duration = Duration::from_secs(15);
/// How often it is looked.
const PAUSE: Duration = Duration::from_millis(250);

/// The prefix of the paths of character devices in persistent memory.
const CHARACTER: &str = "/dev/dax";

/// Comes back when all that pools are configured with is there and enabled, or the time is over.
pub(super) async fn settle(config: &Config) {
    // Most hosts have none, and nothing to be waited for.
    if missing(config, &Inventory::default()).is_empty() {
        return;
    }
    let config = config.clone();
    let waiting = move || {
        let (clock, platform) = (Clock::start(), Platform::default());
        loop {
            let missing = match platform.read() {
                Ok(inventory) => missing(&config, &inventory),
                // While devices come one by one that may be over in a moment.
                Err(error) => vec![error.text()],
            };
            if missing.is_empty() {
                return;
            }
            if clock.elapsed() >= LIMIT {
                tracing::warn!("not there, or not enabled: {}", missing.join(", "));
                return;
            }
            std::thread::sleep(PAUSE);
        }
    };
    let _ = tokio::task::spawn_blocking(waiting).await;
}

/// The regions and devices that pools name and that are missing.
fn missing(config: &Config, inventory: &Inventory) -> Vec<String> {
    let is_whole = |key: &RegionKey, with_namespaces: bool| {
        let region = inventory.region(key).filter(|region| region.enabled);
        region.is_some_and(|region| !with_namespaces || pooled::check_enabled(region).is_ok())
    };
    let shares = config.pools.iter().filter_map(|pool| pool.region.as_ref());
    let shares = shares.map(|share| (&share.key, true));
    let direct = config.direct_pools.iter().map(|pool| (&pool.region, false));
    let regions = shares.chain(direct).filter(|(key, whole)| !is_whole(key, *whole));
    let regions = regions.map(|(key, _)| format!("region {key}"));
    let devices = config.pools.iter().flat_map(|pool| &pool.devices);
    let namespaces = devices.filter_map(|device| namespace_of_path(&device.path));
    let is_there = |uuid| inventory.namespace(uuid).is_some_and(|(_, one)| one.device.is_some());
    let namespaces = namespaces.filter(|uuid| !is_there(*uuid));
    let devices = config.pools.iter().flat_map(|pool| &pool.devices);
    let paths = devices.map(|device| &device.path).filter(|path| is_character(path));
    let paths = paths.filter(|path| !path.exists()).map(|path| path.display().to_string());
    regions.chain(namespaces.map(|uuid| format!("namespace {uuid}"))).chain(paths).collect()
}

fn is_character(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.starts_with(CHARACTER))
}

#[cfg(test)]
mod tests {
    use blockd_media::place::Places;
    use blockd_pmem::platform::pooled::Target;
    use blockd_pmem::platform::testing::{FakeHost, FakeSpec, Shown};
    use blockd_pmem::platform::{Kernel, Uuid};

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn only_named_namespaces_are_waited_for() {
        let host = FakeHost::new(&[FakeSpec::new(1, GIB), FakeSpec::new(2, GIB)]);
        let uuid = Uuid::of_random([7; 16]);
        let target = Target::Percentage(50);
        host.platform().ensure_pool_space(&RegionKey::Cookie(1), target, uuid).unwrap();
        let config = |lines: &str| {
            let text = format!("default_pool = \"p\"\n[[pool]]\nname = \"p\"\n{lines}");
            Config::parse(&text, None, &Places::of_root()).unwrap()
        };
        let all = [
            ("kind = \"pmem\"\nregion = \"0x1\"".to_owned(), "region 0x1"),
            (format!("kind = \"pmem\"\nnamespace = \"{uuid}\""), "namespace 07"),
            ("kind = \"pmem-direct\"\nregion = \"0x2\"".to_owned(), "region 0x2"),
        ]
        .map(|(lines, missing)| (config(&lines), missing));
        let other = config("path = \"/dev/sda\"");
        let by_path = config("kind = \"pmem\"\npath = \"/dev/dax99.0\"");
        let absent = |config: &Config| missing(config, &host.platform().read().unwrap());
        for (config, _) in &all {
            assert_eq!(absent(config), [""; 0]);
        }
        assert_eq!(absent(&by_path), ["/dev/dax99.0"]);
        let inventory = host.platform().read().unwrap();
        let holder = inventory.namespace(uuid).unwrap().1.holder.clone().unwrap();
        host.write(&host.places().sys.join("bus/nd/drivers/dax_pmem/unbind"), &holder).unwrap();
        host.show_region_as(2, Shown::NotEnabled);
        for (config, missing) in &all {
            assert!(absent(config)[0].starts_with(missing), "{:?}", absent(config));
        }
        host.remove_region(1);
        assert_eq!(absent(&all[0].0), ["region 0x1"]);
        assert_eq!(absent(&other), [""; 0]);
    }
}
