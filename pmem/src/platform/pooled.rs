//! Namespaces that pools are made of: ours, by name and mode, and no more of a region than is
//! allowed. The name of a namespace does not prove that its content is a pool: a pool has a mark of
//! its own at its front, which is checked when it is opened.

use super::choose::{self, NoRoom};
use super::error::PlatformError;
use super::key::{RegionKey, Uuid};
use super::namespace::{Mode, Namespace, PageMap};
use super::provision::NamespaceSpec;
use super::region::Region;
use super::share::{Share, share};
use super::step::{HUGE_PAGE, Rule, Step};
use super::{Inventory, Platform};

/// The name of namespaces of pools. Namespaces with other names are never used or changed.
pub const OWN_NAME: &str = "blockd";

/// How much of a region pools may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// A percentage of the region.
    Percentage(u8),
    /// A number of bytes, rounded up.
    Bytes(u64),
}

/// The share of a region that pools have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolSpace {
    /// Its namespaces, by uuid.
    pub namespaces: Vec<Namespace>,
    /// One of them was just made.
    pub made: Option<Uuid>,
    /// The part of the allowed share.
    pub share: Share,
}

/// Namespaces of pools in a region.
pub fn own(region: &Region) -> impl Iterator<Item = &Namespace> {
    region.namespaces.iter().filter(|one| one.alt_name == OWN_NAME && one.mode == Mode::Devdax)
}

/// Plans the namespaces to create in a region, without creating them.
///
/// # Errors
/// When the region has no step, or nothing is there and nothing can be made.
pub fn plan(region: &Region, target: Target) -> Result<Share, PlatformError> {
    let step = Step::of(region, HUGE_PAGE, Rule::Formula).ok_or_else(|| {
        let problem = format!("{} ways cannot be aligned", region.ways);
        PlatformError::Unsupported { what: format!("region {}", region.key), problem }
    })?;
    check_enabled(region)?;
    let has: u64 = own(region).map(|one| one.size).sum();
    let (percent, wanted) = match target {
        Target::Percentage(percent) => (percent, None),
        Target::Bytes(bytes) => (100, Some(step.round_up(bytes).unwrap_or(u64::MAX))),
    };
    let mut found = share(region, percent, has, step);
    if let Some(wanted) = wanted {
        let missing = wanted.saturating_sub(has);
        if missing > 0 {
            let fits = choose::fits(region, missing);
            fits.map_err(|refusal| NoRoom { refusals: vec![refusal] })?;
        }
        found = Share { allowed: wanted, own: has, to_make: missing };
    }
    if found.to_make > 0 || (has == 0 && found.to_make == 0) {
        let fits = choose::fits(region, found.to_make.max(step.bytes()));
        fits.map_err(|refusal| NoRoom { refusals: vec![refusal] })?;
    }
    if has == 0 && found.to_make == 0 {
        return Err(PlatformError::Invalid {
            field: "percentage",
            value: percent.to_string(),
            allowed: format!("more: it is less than a step of region {}: {step}", region.key),
        });
    }
    Ok(found)
}

/// Refuses a region whose pool namespaces cannot be identified, since a new one might be a
/// duplicate.
///
/// # Errors
/// When the region, or one of its namespaces that are called ours, is not enabled, or is bare where
/// it once was more.
pub fn check_enabled(region: &Region) -> Result<(), PlatformError> {
    let refused = |what: String, is: &str| {
        let problem = format!("it is {is}, so that the pools' share of it is unknown");
        Err(PlatformError::Unsupported { what, problem })
    };
    if !region.enabled {
        return refused(format!("region {}", region.key), "not enabled");
    }
    for one in region.namespaces.iter().filter(|one| one.alt_name == OWN_NAME) {
        match (one.device.is_some(), one.mode) {
            (false, _) => return refused(one.to_string(), "not enabled"),
            (true, Mode::Raw) => return refused(one.to_string(), "bare, and was of another mode"),
            _ => {}
        }
    }
    Ok(())
}

impl Platform {
    /// Creates the missing part of the pools' share of a region. Existing namespaces count, and
    /// none of them shrinks.
    ///
    /// # Errors
    /// When there is no room, or the kernel refuses.
    pub fn ensure_pool_space(
        &self,
        key: &RegionKey,
        target: Target,
        uuid: Uuid,
    ) -> Result<PoolSpace, PlatformError> {
        // Namespaces that others make meanwhile would not be counted.
        let lock = self.lock()?;
        let inventory = self.read()?;
        let share = plan(region_of(&inventory, key)?, target)?;
        let mut made = None;
        if share.to_make > 0 {
            let spec = NamespaceSpec {
                uuid,
                alt_name: OWN_NAME.to_owned(),
                mode: Mode::Devdax,
                map: PageMap::Device,
                align: HUGE_PAGE,
                size: share.to_make,
            };
            self.create_under(&lock, key, &spec)?;
            made = Some(uuid);
        }
        let inventory = self.read()?;
        let namespaces = own(region_of(&inventory, key)?).cloned().collect();
        Ok(PoolSpace { namespaces, made, share })
    }
}

fn region_of<'a>(inventory: &'a Inventory, key: &RegionKey) -> Result<&'a Region, PlatformError> {
    let found = inventory.region(key);
    found.ok_or_else(|| PlatformError::NotFound { what: "region", name: key.to_string() })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{FakeHost, FakeSpec};
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn uuid(number: u8) -> Uuid {
        Uuid::of_random([number; 16])
    }

    fn ensure(host: &std::sync::Arc<FakeHost>, target: Target, number: u8) -> PoolSpace {
        host.platform().ensure_pool_space(&RegionKey::Cookie(1), target, uuid(number)).unwrap()
    }

    /// Rows: P8, P50.
    #[test]
    fn pool_space_is_made_once() {
        let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
        let first = ensure(&host, Target::Percentage(50), 1);
        assert_eq!((first.made, first.namespaces.len()), (Some(uuid(1)), 1));
        assert_eq!(first.namespaces[0].size, 512 * MIB);
        host.reboot();
        let second = ensure(&host, Target::Percentage(50), 2);
        assert_eq!((second.made, second.namespaces.len()), (None, 1));
        assert_eq!(second.namespaces[0].uuid, Some(uuid(1)));
    }

    /// Row: P9.
    #[test]
    fn a_share_that_is_raised_grows_and_one_that_is_lowered_does_not_shrink() {
        let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
        ensure(&host, Target::Percentage(50), 1);
        let raised = ensure(&host, Target::Percentage(75), 2);
        assert_eq!((raised.made, raised.share.to_make), (Some(uuid(2)), 256 * MIB));
        let lowered = ensure(&host, Target::Percentage(10), 3);
        assert!(lowered.made.is_none() && lowered.share.is_beyond());
        assert_eq!(lowered.namespaces.iter().map(|one| one.size).sum::<u64>(), 768 * MIB);
    }

    /// Row: P11.
    #[test]
    fn namespaces_with_other_names_are_foreign() {
        let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
        let platform = host.platform();
        let theirs = NamespaceSpec {
            uuid: uuid(9),
            alt_name: "theirs".to_owned(),
            mode: Mode::Devdax,
            map: PageMap::Device,
            align: HUGE_PAGE,
            size: 256 * MIB,
        };
        platform.create(&RegionKey::Cookie(1), &theirs).unwrap();
        // The name of pools, but not their mode.
        let other = NamespaceSpec {
            uuid: uuid(8),
            alt_name: OWN_NAME.to_owned(),
            mode: Mode::Fsdax,
            ..theirs
        };
        platform.create(&RegionKey::Cookie(1), &other).unwrap();
        let space = ensure(&host, Target::Percentage(100), 1);
        assert_eq!(space.share.own, 0);
        assert_eq!(space.namespaces.len(), 1);
        assert_eq!(space.namespaces[0].size, 512 * MIB);
    }

    #[test]
    fn shares_and_sizes_without_room_are_refused() {
        let host = FakeHost::new(&[FakeSpec::new(1, GIB), FakeSpec::new(2, GIB).without_labels()]);
        let refused = |region: u64, target| {
            let key = RegionKey::Cookie(region);
            let writes = host.writes();
            let error = host.platform().ensure_pool_space(&key, target, uuid(1)).unwrap_err();
            assert_eq!(host.writes(), writes);
            error.to_string()
        };
        assert!(refused(1, Target::Percentage(1)).contains("less than a step of region 0x1"));
        assert!(refused(1, Target::Bytes(2 * GIB)).contains("2147483648 bytes needed, 1073741824"));
        assert!(refused(2, Target::Percentage(50)).contains("has no labels"));
        assert!(refused(3, Target::Percentage(50)).contains("region 0x3 does not exist"));
        let made = ensure(&host, Target::Bytes(100 * MIB), 1);
        assert_eq!(made.namespaces[0].size, 112 * MIB);
        assert!(ensure(&host, Target::Bytes(100 * MIB), 2).made.is_none());
    }
}
