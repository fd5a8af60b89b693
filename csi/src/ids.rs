//! Between names and ids of the interface and names of the daemon's volumes.
//!
//! With P for the driver's prefix: volume NAME of pool POOL is the daemon's `P` `body(NAME)`, with
//! the id `POOL/` and that. Its snapshot S is the daemon's `P` `body(NAME)` `@` `body(S)`, with the
//! id `POOL/` and that, so that its source is known as long as it exists. Names with another prefix
//! are foreign. The names of its members identify a group of snapshots, so that nothing has to be
//! stored: its body is `~g`, how many there are, and a digest of its name. Each member is the
//! daemon's `P` `body(SOURCE)` `@` and that body, and the group has the id `POOL/P` and that body.
//! No name of a user's is its own body with a `~` in it, and `g` is no digit of a digest.

use std::fmt;

use blockd_csi_base::options::DEFAULT_DRIVER;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::error::Error;
use crate::limits::MAX_STRING;

/// Longest body: prefix, two of them, and `@` are at most 128 bytes, the limit of the daemon.
const MAX_BODY: usize = 57;

/// Begins bodies that are not the name itself; no name that is its own body has it.
const MARK: char = '~';

/// A body that is a digest: [`MARK`] and 32 digits.
const DIGEST_BODY: usize = 33;

/// Begins the body of a snapshot that a clone is being made from.
const CLONE: &str = "~clone-";

/// Begins the body of a volume that lives as long as its pod.
const EPHEMERAL: &str = "~e";

/// Begins the body of a group's snapshots: one digit for how many they are, less one, and
/// [`GROUP_DIGITS`] of its name follow.
const GROUP: &str = "~g";

/// Digits of a group's digest: with the rest, its body is as long as any digest's.
const GROUP_DIGITS: usize = 30;

/// Snapshots in one group: the daemon's limit of one cut, and the range of one digit.
pub const MAX_GROUP: usize = 16;

/// A volume: its pool, and the daemon's name of it. Shows as its id.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct VolumeId {
    /// The pool's name, never empty.
    pub pool: String,
    /// The daemon's name of the volume.
    pub name: String,
}

/// A snapshot: its pool, and the daemon's name of it. Shows as its id.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SnapshotId {
    /// The pool's name, never empty.
    pub pool: String,
    /// The daemon's name of the snapshot.
    pub name: String,
}

/// A group of snapshots that were taken in one cut. Shows as its id.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupId {
    /// The pool of all of them, never empty.
    pub pool: String,
    prefix: String,
    body: String,
}

/// Classifies a name of the daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A foreign name, or one that this driver would never use.
    Foreign,
    /// A volume of the controller's.
    Volume,
    /// A snapshot of the controller's, in a group or not.
    Snapshot,
    /// A snapshot that is there while a clone is made.
    CloneSnapshot,
    /// A volume that lives as long as its pod.
    Ephemeral,
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pool, self.name)
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pool, self.name)
    }
}

impl SnapshotId {
    /// The volume that it is of, which may be gone.
    #[must_use]
    pub fn source(&self) -> VolumeId {
        let name = self.name.split('@').next().unwrap_or_default().to_owned();
        VolumeId { pool: self.pool.clone(), name }
    }

    /// Its own part of the name.
    #[must_use]
    pub fn body(&self) -> &str {
        self.name.split_once('@').map_or("", |(_, body)| body)
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}{}", self.pool, self.prefix, self.body)
    }
}

impl GroupId {
    /// The snapshot that is of this group and of that volume, which has to be in the same pool.
    #[must_use]
    pub fn member(&self, source: &VolumeId) -> SnapshotId {
        SnapshotId { pool: self.pool.clone(), name: format!("{}@{}", source.name, self.body) }
    }

    /// How many snapshots it was made of.
    #[must_use]
    pub fn count(&self) -> usize {
        let digit = self.body.chars().nth(GROUP.len()).and_then(|digit| digit.to_digit(16));
        digit.map_or(0, |less_one| usize::try_from(less_one).unwrap_or(0) + 1)
    }

    /// Whether it has this name, whatever its pool and how many it was made of.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        self.body.get(GROUP.len() + 1..) == Some(group_digest(name).as_str())
    }
}

/// The names of one driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Names {
    prefix: String,
}

impl Names {
    /// For the driver of that name.
    #[must_use]
    pub fn new(driver: &str) -> Self {
        let prefix = if driver == DEFAULT_DRIVER {
            "csi.".to_owned()
        } else {
            let digits = format!("{:016x}", xxh3_64(driver.as_bytes()));
            format!("csi-{}.", &digits[..8])
        };
        Self { prefix }
    }

    /// Begins each of the driver's names.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Longest name of a pool with which every id fits the limit of the specification.
    #[must_use]
    pub const fn max_pool(&self) -> usize {
        // POOL / prefix body @ digest
        MAX_STRING - 1 - self.prefix.len() - MAX_BODY - 1 - DIGEST_BODY
    }

    /// Refuses a pool whose name is too long for ids.
    ///
    /// # Errors
    /// The name is too long.
    pub fn check_pool(&self, field: &str, pool: &str) -> Result<(), Error> {
        if pool.len() > self.max_pool() {
            let allowed = format!("at most {} bytes, so that ids have 128", self.max_pool());
            return Err(Error::invalid(field, pool, allowed));
        }
        Ok(())
    }

    /// Returns the id of the volume of this name.
    #[must_use]
    pub fn volume(&self, pool: &str, name: &str) -> VolumeId {
        VolumeId { pool: pool.to_owned(), name: format!("{}{}", self.prefix, body(name)) }
    }

    /// The volume of an id; `None` if it is none of ours, so that it can't exist.
    #[must_use]
    pub fn parse_volume(&self, id: &str) -> Option<VolumeId> {
        let (pool, name) = split(id)?;
        let kind = self.kind(name);
        (kind == Kind::Volume).then(|| VolumeId { pool: pool.to_owned(), name: name.to_owned() })
    }

    /// Returns the id of the snapshot of this name, of that volume.
    #[must_use]
    pub fn snapshot(&self, source: &VolumeId, name: &str) -> SnapshotId {
        let [plain, digest] = Self::snapshot_bodies(name);
        let of = |body: &str| SnapshotId {
            pool: source.pool.clone(),
            name: format!("{}@{body}", source.name),
        };
        let id = of(&plain);
        if id.pool.len() + 1 + id.name.len() > MAX_STRING { of(&digest) } else { id }
    }

    /// The bodies that a snapshot of this name can have; which one depends on how long the names of
    /// pool and volume are.
    #[must_use]
    pub fn snapshot_bodies(name: &str) -> [String; 2] {
        [body(name), digest(name)]
    }

    /// The snapshot of an id; `None` if it is none of ours.
    #[must_use]
    pub fn parse_snapshot(&self, id: &str) -> Option<SnapshotId> {
        let (pool, name) = split(id)?;
        let kind = self.kind(name);
        (kind == Kind::Snapshot)
            .then(|| SnapshotId { pool: pool.to_owned(), name: name.to_owned() })
    }

    /// Returns the id of the group of this name with `count` snapshots; at most [`MAX_GROUP`].
    #[must_use]
    pub fn group(&self, pool: &str, name: &str, count: usize) -> GroupId {
        let less_one = count.saturating_sub(1).min(MAX_GROUP - 1);
        let body = format!("{GROUP}{less_one:x}{}", group_digest(name));
        GroupId { pool: pool.to_owned(), prefix: self.prefix.clone(), body }
    }

    /// The group of an id; `None` if it is none of ours, so that it can't exist.
    #[must_use]
    pub fn parse_group(&self, id: &str) -> Option<GroupId> {
        let (pool, name) = split(id)?;
        let body = name.strip_prefix(&self.prefix).filter(|body| is_group(body))?;
        let (prefix, body) = (self.prefix.clone(), body.to_owned());
        Some(GroupId { pool: pool.to_owned(), prefix, body })
    }

    /// The group that a snapshot is of.
    #[must_use]
    pub fn group_of(&self, snapshot: &SnapshotId) -> Option<GroupId> {
        let body = Some(snapshot.body()).filter(|body| is_group(body))?;
        let (prefix, body) = (self.prefix.clone(), body.to_owned());
        Some(GroupId { pool: snapshot.pool.clone(), prefix, body })
    }

    /// The daemon's name of the snapshot that `target` is cloned from while it is made.
    #[must_use]
    pub fn clone_snapshot(&self, source: &VolumeId, target: &VolumeId) -> String {
        format!("{}@{}", source.name, Self::clone_body(target))
    }

    /// The end of that name, whatever the source.
    #[must_use]
    pub fn clone_body(target: &VolumeId) -> String {
        format!("{CLONE}{:016x}", xxh3_64(target.name.as_bytes()))
    }

    /// The daemon's name of the volume that lives as long as the pod that kubelet calls `id`.
    #[must_use]
    pub fn ephemeral(&self, id: &str) -> String {
        format!("{}{EPHEMERAL}{:032x}", self.prefix, xxh3_128(id.as_bytes()))
    }

    /// Classifies a name of the daemon.
    #[must_use]
    pub fn kind(&self, name: &str) -> Kind {
        let Some(rest) = name.strip_prefix(&self.prefix) else { return Kind::Foreign };
        let Some((volume, snapshot)) = rest.split_once('@') else {
            return match rest {
                _ if is_body(rest) => Kind::Volume,
                _ if is_digits(rest.strip_prefix(EPHEMERAL), 32) => Kind::Ephemeral,
                _ => Kind::Foreign,
            };
        };
        match snapshot {
            _ if !is_body(volume) => Kind::Foreign,
            _ if is_body(snapshot) || is_group(snapshot) => Kind::Snapshot,
            _ if is_digits(snapshot.strip_prefix(CLONE), 16) => Kind::CloneSnapshot,
            _ => Kind::Foreign,
        }
    }
}

/// Returns the body of a name: the name itself where possible, else a digest.
fn body(name: &str) -> String {
    if is_plain(name) { name.to_owned() } else { digest(name) }
}

fn digest(name: &str) -> String {
    format!("{MARK}{:032x}", xxh3_128(name.as_bytes()))
}

fn group_digest(name: &str) -> String {
    // The truncated digest keeps the probability of a collision below 2^-120.
    let mut digits = format!("{:032x}", xxh3_128(name.as_bytes()));
    digits.truncate(GROUP_DIGITS);
    digits
}

fn is_group(body: &str) -> bool {
    is_digits(body.strip_prefix(GROUP), 1 + GROUP_DIGITS)
}

fn is_plain(name: &str) -> bool {
    let fits = (1..=MAX_BODY).contains(&name.len());
    fits && !name.chars().any(|c| c == '/' || c == '@' || c == MARK || c.is_control())
}

fn is_body(text: &str) -> bool {
    is_plain(text) || is_digits(text.strip_prefix(MARK), 32)
}

fn is_digits(text: Option<&str>, count: usize) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.is_some_and(|text| text.len() == count && text.bytes().all(is_digit))
}

fn split(id: &str) -> Option<(&str, &str)> {
    let (pool, name) = id.split_once('/')?;
    let possible =
        id.len() <= MAX_STRING && !pool.is_empty() && !pool.chars().any(char::is_control);
    possible.then_some((pool, name))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::{any, prop_assert, prop_assert_eq, prop_assert_ne, proptest};

    use super::*;

    const UUID: &str = "pvc-8c9f2b1e-4b4e-4a55-9d5a-1f2e3d4c5b6a";

    #[test]
    fn names_of_kubernetes_stay_readable() {
        let names = Names::new(DEFAULT_DRIVER);
        let volume = names.volume("default", UUID);
        assert_eq!(volume.to_string(), format!("default/csi.{UUID}"));
        let snapshot = names.snapshot(&volume, "snapshot-1");
        assert_eq!(snapshot.to_string(), format!("default/csi.{UUID}@snapshot-1"));
        assert_eq!(snapshot.source(), volume);
        assert_eq!(snapshot.body(), "snapshot-1");
        assert_eq!(names.kind("csi.a@~clone-0123456789abcdef"), Kind::CloneSnapshot);
        assert_eq!(names.kind(&names.ephemeral("csi-17")), Kind::Ephemeral);
    }

    #[test]
    fn foreign_names_have_no_id() {
        let names = Names::new(DEFAULT_DRIVER);
        let other = Names::new("csi.example.com");
        assert_eq!(other.prefix().len(), 13);
        let theirs = other.volume("default", "a").to_string();
        let long = format!("default/csi.{}", "a".repeat(1 << 20));
        let foreign = [
            "",
            "a",
            "/",
            "default/",
            "/csi.a",
            "default/a",
            "default/csi.",
            "default/csi.a/b",
            "default/csi.a@b",
            "default/csi.~a",
            "default/csi.a@",
            "default/csi.@a",
            "de\nfault/csi.a",
            "default/csi.~e0123456789abcdef0123456789abcdef",
            "default/csi.a\u{1}",
            &theirs,
            &long,
        ];
        for id in foreign {
            assert_eq!(names.parse_volume(id), None, "{id}");
        }
        for id in ["default/csi.a", "default/csi.a@b@c", "default/csi.a@~clone-0123456789abcdef"] {
            assert_eq!(names.parse_snapshot(id), None, "{id}");
        }
        let whole = names.group("default", "g", 3).to_string();
        assert_eq!(names.parse_volume(&whole), None);
        assert_eq!(names.parse_snapshot(&whole), None);
        let wrong = [
            "default/csi.a",
            "default/csi.~g",
            "default/csi.~0123456789abcdef0123456789abcdef",
            &whole[..whole.len() - 1],
            &format!("{whole}0"),
            &whole.to_uppercase(),
            &whole.replace("csi.", "csi.a@"),
            &whole.replace("default", ""),
            &other.group("default", "g", 3).to_string(),
        ];
        for id in wrong {
            assert_eq!(names.parse_group(id), None, "{id}");
        }
        assert_eq!(names.kind("data"), Kind::Foreign);
    }

    #[test]
    fn drivers_side_by_side_have_prefixes_of_their_own() {
        let drivers = ["csi.blockd.io", "fast.blockd.io", "a", "b", "c.d"];
        let prefixes: BTreeSet<String> =
            drivers.iter().map(|driver| Names::new(driver).prefix().to_owned()).collect();
        assert_eq!(prefixes.len(), drivers.len());
        for one in &prefixes {
            assert!(prefixes.iter().all(|other| one == other || !other.starts_with(one)));
        }
    }

    #[test]
    fn the_names_of_its_snapshots_identify_a_group() {
        let names = Names::new(DEFAULT_DRIVER);
        let volume = names.volume("default", UUID);
        for count in 1..=MAX_GROUP {
            let group = names.group("default", "nightly", count);
            assert_eq!(group.count(), count);
            assert!(group.is_named("nightly") && !group.is_named("nightly2"));
            let member = group.member(&volume);
            assert_eq!(member.source(), volume);
            assert_eq!(names.group_of(&member), Some(group.clone()));
            assert_eq!(names.kind(&member.name), Kind::Snapshot);
            assert_eq!(names.parse_group(&group.to_string()), Some(group));
        }
        assert_eq!(names.group_of(&names.snapshot(&volume, "nightly")), None);
    }

    #[test]
    fn a_pool_with_a_long_name_is_refused() {
        let names = Names::new("other");
        assert_eq!(names.max_pool(), 23);
        assert!(names.check_pool("pool", &"p".repeat(23)).is_ok());
        let error = names.check_pool("pool", &"p".repeat(24)).unwrap_err();
        assert!(error.to_string().ends_with("at most 23 bytes, so that ids have 128"), "{error}");
    }

    proptest! {
        #[test]
        fn every_name_has_an_id_that_leads_back(
            driver in "csi\\.blockd\\.io|[a-z]{1,63}", pool in "[a-z]{1,23}",
            volume in "\\PC{1,128}|[ -~]{1,128}|[a-z0-9-]{1,128}",
            snapshot in "\\PC{1,128}|[ -~]{1,128}|[a-z0-9-]{1,128}|~g[0-9a-f]{31}",
            count in 1..=MAX_GROUP,
        ) {
            let names = Names::new(&driver);
            let id = names.volume(&pool, &volume);
            prop_assert!(id.to_string().len() <= 128 && id.name.len() <= 128);
            prop_assert_eq!(names.kind(&id.name), Kind::Volume);
            prop_assert_eq!(names.parse_volume(&id.to_string()), Some(id.clone()));
            let made = names.snapshot(&id, &snapshot);
            prop_assert!(made.to_string().len() <= 128 && made.name.len() <= 128);
            prop_assert_eq!(names.kind(&made.name), Kind::Snapshot);
            prop_assert_eq!(made.source(), id.clone());
            let bodies = Names::snapshot_bodies(&snapshot);
            prop_assert!(bodies.iter().any(|body| body == made.body()));
            prop_assert_eq!(names.parse_snapshot(&made.to_string()), Some(made.clone()));
            prop_assert_eq!(names.group_of(&made), None);
            let group = names.group(&pool, &snapshot, count);
            prop_assert!(group.to_string().len() <= 128 && group.is_named(&snapshot));
            prop_assert_eq!(group.count(), count);
            prop_assert_eq!(names.parse_group(&group.to_string()), Some(group.clone()));
            let member = group.member(&id);
            prop_assert!(member.to_string().len() <= 128 && member.name.len() <= 128);
            prop_assert_ne!(&member, &made);
            prop_assert_eq!(names.parse_snapshot(&member.to_string()), Some(member.clone()));
            prop_assert_eq!(names.group_of(&member), Some(group));
            let made = names.clone_snapshot(&id, &names.volume(&pool, &snapshot));
            prop_assert!(made.len() <= 128);
            prop_assert_eq!(names.kind(&made), Kind::CloneSnapshot);
        }

        #[test]
        fn two_names_are_two_volumes(one in any::<String>(), other in any::<String>()) {
            let names = Names::new(DEFAULT_DRIVER);
            if one != other {
                prop_assert_ne!(names.volume("p", &one), names.volume("p", &other));
            }
        }

        #[test]
        fn no_id_is_a_panic(id in any::<String>(), near in "p/csi\\.(a@)?~g?[0-9a-gä]{28,34}") {
            let names = Names::new(DEFAULT_DRIVER);
            for id in [id, near] {
                let _ = (names.parse_volume(&id), names.parse_snapshot(&id), names.kind(&id));
                if let Some(group) = names.parse_group(&id) {
                    prop_assert_eq!(group.to_string(), id);
                    prop_assert!((1..=MAX_GROUP).contains(&group.count()));
                }
            }
        }
    }
}
