//! Volumes on storage that several nodes reach: each is alone in a cell of a volume group, so that
//! each moves between nodes by itself.
//!
//! A cell's name is `csi-`, six digits of the driver and the cluster, `-`, and twelve digits of the
//! name that CreateVolume was called with. The class is no part of it: a class that changes between
//! two tries of a call makes no second cell. The volume in it is named after the same digits, so
//! that the id GROUP/CELL/VOLUME follows from the cell's name alone, wherever the cell is.

mod bring;
mod groups;

use std::collections::HashMap;
use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

use crate::error::Error;
use crate::ids::Names;
use crate::limits::MAX_STRING;
use crate::proto::Topology;

pub(crate) use self::bring::{Aim, bring, is_used_elsewhere, open, unopened};
pub(crate) use self::groups::{all, find, known_names, names, space, with_cell};

/// Begins the name of each cell of a plugin.
const CELL: &str = "csi-";

/// Digits of the driver and the cluster.
const OWNER_DIGITS: usize = 6;

/// Digits of the volume's name.
const VOLUME_DIGITS: usize = 12;

/// Begins the last part of the topology key of a group.
const KEY: &str = "vg.";

/// Bytes of the last part of a label's key in Kubernetes, which topology keys are.
const MAX_LABEL: usize = 63;

/// The longest name of a cluster, which is only hashed: that of a DNS name.
const MAX_CLUSTER: usize = 253;

/// A volume in a cell of its own. Shows as its id.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CellId {
    /// The volume group.
    pub group: String,
    /// The cell, and the pool in it.
    pub cell: String,
    /// The daemon's name of the volume.
    pub volume: String,
}

impl fmt::Display for CellId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.group, self.cell, self.volume)
    }
}

/// The cells of one driver in one cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cells {
    /// Of the names of cells.
    prefix: String,
    /// Of the names of volumes.
    of_volumes: String,
    /// Of topology keys.
    key: String,
}

impl Cells {
    /// For the driver of that name, in the cluster of that name, which may be empty.
    #[must_use]
    pub fn new(driver: &str, cluster: &str) -> Self {
        // No name of a driver or cluster has a control character.
        let owner = digits(&format!("{driver}\u{1}{cluster}"), OWNER_DIGITS);
        let of_volumes = Names::new(driver).prefix().to_owned();
        Self { prefix: format!("{CELL}{owner}-"), of_volumes, key: format!("{driver}/{KEY}") }
    }

    /// Returns the id of the volume of this name.
    #[must_use]
    pub fn id(&self, group: &str, name: &str) -> CellId {
        self.of_digits(group, &digits(name, VOLUME_DIGITS))
    }

    fn of_digits(&self, group: &str, digits: &str) -> CellId {
        CellId {
            group: group.to_owned(),
            cell: format!("{}{digits}", self.prefix),
            volume: format!("{}{digits}", self.of_volumes),
        }
    }

    /// The volume in a cell; `None` if the cell is not of this driver and cluster.
    #[must_use]
    pub fn in_cell(&self, group: &str, cell: &str) -> Option<CellId> {
        let found = cell.strip_prefix(&self.prefix)?;
        is_digits(found, VOLUME_DIGITS).then(|| self.of_digits(group, found))
    }

    /// The volume of an id; `None` if it is none of ours, so that it can't exist.
    #[must_use]
    pub fn parse(&self, id: &str) -> Option<CellId> {
        let (group, rest) = id.split_once('/').filter(|_| id.len() <= MAX_STRING)?;
        let (cell, volume) = rest.split_once('/')?;
        self.in_cell(group, cell).filter(|it| is_group(group) && it.volume == volume)
    }

    /// Whether a pool is a cell of this driver and cluster.
    #[must_use]
    pub fn has_pool(&self, pool: &str) -> bool {
        self.in_cell("", pool).is_some()
    }

    /// The topology key of a group.
    #[must_use]
    pub fn key(&self, group: &str) -> String {
        format!("{}{group}", self.key)
    }

    /// Where volumes of a group can be reached: on each node whose daemon has it.
    #[must_use]
    pub fn topology(&self, group: &str) -> Topology {
        Topology { segments: HashMap::from([(self.key(group), "true".to_owned())]) }
    }
}

/// Whether a pool is a cell of any plugin, as far as its name says.
#[must_use]
pub fn is_cell(pool: &str) -> bool {
    let rest = pool.strip_prefix(CELL).and_then(|rest| rest.split_once('-'));
    rest.is_some_and(|(owner, volume)| {
        is_digits(owner, OWNER_DIGITS) && is_digits(volume, VOLUME_DIGITS)
    })
}

/// Whether a group's name can be a part of a topology key: by the rules for labels of Kubernetes.
#[must_use]
pub fn is_group(name: &str) -> bool {
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    name.len() <= MAX_LABEL - KEY.len()
        && ends(name.bytes().next())
        && ends(name.bytes().last())
        && name.bytes().all(fits)
}

/// Checks the name of a volume group.
///
/// # Errors
/// The name can't be a part of a topology key. The error names `field`.
pub fn check_group(field: &str, name: &str) -> Result<(), Error> {
    if is_group(name) {
        return Ok(());
    }
    let most = MAX_LABEL - KEY.len();
    let allowed = format!(
        "1 to {most} letters, digits, '-', '_' and '.' that begin and end with a letter or digit: \
         it is a part of a label's key"
    );
    Err(Error::invalid(field, name, allowed))
}

/// Checks the name of a cluster.
///
/// # Errors
/// The name is too long or has other characters. The error names `field`.
pub fn check_cluster(field: &str, name: &str) -> Result<(), Error> {
    let fits = |byte: u8| byte.is_ascii_graphic();
    if name.len() <= MAX_CLUSTER && name.bytes().all(fits) {
        return Ok(());
    }
    let allowed = format!("at most {MAX_CLUSTER} printable characters without spaces");
    Err(Error::invalid(field, name, allowed))
}

fn digits(text: &str, count: usize) -> String {
    let mut digits = format!("{:016x}", xxh3_64(text.as_bytes()));
    digits.truncate(count);
    digits
}

fn is_digits(text: &str, count: usize) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == count && text.bytes().all(is_digit)
}

#[cfg(test)]
mod tests {
    use blockd_csi_base::options::DEFAULT_DRIVER;

    use super::*;

    #[test]
    fn an_id_follows_from_the_name_of_the_cell() {
        let cells = Cells::new(DEFAULT_DRIVER, "");
        let id = cells.id("san", "pvc-1");
        assert_eq!(id.cell.len(), 23, "{id}");
        assert_eq!(cells.in_cell("san", &id.cell), Some(id.clone()));
        assert_eq!(cells.parse(&id.to_string()), Some(id.clone()));
        assert!(cells.has_pool(&id.cell) && is_cell(&id.cell));
        // Names of cells are of a-z, 0-9, '.' and '-'.
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        assert!(id.cell.bytes().all(plain), "{id}");
        // The longest that can be, with the longest prefix of a driver.
        let longest = Cells::new("a.b", "").id(&"g".repeat(MAX_LABEL - KEY.len()), "pvc-1");
        assert!(longest.to_string().len() <= MAX_STRING, "{longest}");
    }

    #[test]
    fn cells_of_another_driver_or_cluster_are_foreign() {
        let cells = Cells::new(DEFAULT_DRIVER, "");
        let id = cells.id("san", "pvc-1");
        for other in [Cells::new(DEFAULT_DRIVER, "second"), Cells::new("a.b", "")] {
            assert_ne!(other.id("san", "pvc-1").cell, id.cell);
            assert_eq!(other.parse(&id.to_string()), None);
            assert_eq!(other.in_cell("san", &id.cell), None);
            assert!(is_cell(&other.id("san", "pvc-1").cell));
        }
        let (group, rest) = ("san", &id.to_string()["san".len()..]);
        let long = "g".repeat(61);
        for wrong in ["", "-", "a+b", "ä", "a/b", &long] {
            assert_eq!(cells.parse(&format!("{wrong}{rest}")), None, "{wrong}");
            assert!(check_group("volume-group", wrong).is_err(), "{wrong}");
        }
        check_group("volume-group", group).unwrap();
        for wrong in [id.cell.as_str(), "san/vm-1/csi.a", &format!("{id}x"), &format!("{id}/x")] {
            assert_eq!(cells.parse(wrong), None, "{wrong}");
        }
        let other = cells.id("san", "pvc-2");
        assert_eq!(cells.parse(&format!("san/{}/{}", id.cell, other.volume)), None);
        for pool in ["default", "csi-", "csi-012345-", "csi-012345-0123456789aB", "vm-1"] {
            assert!(!is_cell(pool), "{pool}");
        }
    }

    #[test]
    fn the_key_of_a_group_is_a_label() {
        let cells = Cells::new(DEFAULT_DRIVER, "");
        let topology = cells.topology("san");
        assert_eq!(topology.segments["csi.blockd.io/vg.san"], "true");
        assert_ne!(cells.key("san"), Cells::new("a.b", "").key("san"));
        assert!(check_cluster("cluster", &"c".repeat(254)).is_err());
        assert!(check_cluster("cluster", "a b").is_err());
        check_cluster("cluster", "").unwrap();
    }
}
