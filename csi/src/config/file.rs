//! The file of the configuration, as it is written, and the checks of its values.

use std::collections::BTreeSet;

use blockd_csi_base::error::Invalid;
use blockd_csi_base::quantity::{self, Ratio};
use serde::Deserialize;

use super::{Class, Config, Kind, Minimum};
use crate::cells::check_cluster;
use crate::error::Error;
use crate::ids::Names;
use crate::limits::MAX_STRING;
use crate::placement::Placement;

/// The size of a volume whose claim has none, as is usual in Kubernetes.
const DEFAULT_SIZE: &str = "1Gi";

/// Smallest sizes: the size that a file system needs to be usable.
const MINIMUM: [&str; 4] = ["8Mi", "32Mi", "300Mi", "200Mi"];

/// Pools of one class: regions of persistent memory of the largest machines.
const MAX_POOLS: usize = 64;

/// Reads the text of a configuration.
pub(super) fn read(text: &str, names: &Names) -> Result<Config, Error> {
    let file: File = toml::from_str(text)
        .map_err(|error| Error::unexpected("configuration:", one_line(&error)))?;
    let size = |field: &str, given: Option<Written>, default: &str| match given {
        None => quantity::size(field, default),
        Some(given) => {
            let size = quantity::size(field, &given.text())?;
            let allowed = "more than 0";
            if size.is_zero() { Err(Invalid::new(field, 0, allowed)) } else { Ok(size) }
        }
    };
    let [block, ext4, xfs, btrfs] = MINIMUM;
    let given = file.minimum.unwrap_or_default();
    let minimum = Minimum {
        block: size("minimum.block", given.block, block)?,
        ext4: size("minimum.ext4", given.ext4, ext4)?,
        xfs: size("minimum.xfs", given.xfs, xfs)?,
        btrfs: size("minimum.btrfs", given.btrfs, btrfs)?,
    };
    let default_size = size("default_size", file.default_size, DEFAULT_SIZE)?;
    let classes = file.class.unwrap_or_default();
    let classes: Result<Vec<Class>, Error> =
        classes.into_iter().map(|class| class.checked(names)).collect();
    let classes = with_default(classes?)?;
    let health = file.health.and_then(|health| health.enabled).unwrap_or(true);
    let multi_writer = file.access_modes.and_then(|modes| modes.single_node_multi_writer);
    let multi_writer = multi_writer.unwrap_or(true);
    let cluster = file.cluster.unwrap_or_default();
    check_cluster("cluster", &cluster)?;
    Ok(Config { default_size, minimum, classes, cluster, health, multi_writer })
}

fn with_default(mut classes: Vec<Class>) -> Result<Vec<Class>, Error> {
    let mut names = BTreeSet::new();
    for class in &classes {
        if !names.insert(class.name.as_str()) {
            return Err(Error::invalid("class.name", &class.name, "the name of one class only"));
        }
    }
    let defaults = classes.iter().filter(|class| class.is_default).count();
    match (classes.len(), defaults) {
        (0, _) => classes.push(Class::usual("default")),
        (1, 0) => classes[0].is_default = true,
        (_, 1) => {}
        (_, count) => {
            let allowed = "set to true for exactly one class";
            return Err(Error::invalid(
                "class.default",
                format_args!("set {count} times"),
                allowed,
            ));
        }
    }
    Ok(classes)
}

fn one_line(error: &toml::de::Error) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    cluster: Option<String>,
    default_size: Option<Written>,
    minimum: Option<FileMinimum>,
    class: Option<Vec<FileClass>>,
    health: Option<FileHealth>,
    access_modes: Option<FileAccessModes>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileHealth {
    enabled: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileAccessModes {
    single_node_multi_writer: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct FileMinimum {
    block: Option<Written>,
    ext4: Option<Written>,
    xfs: Option<Written>,
    btrfs: Option<Written>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileClass {
    name: String,
    pool: Option<String>,
    pools: Option<Vec<String>>,
    kind: Option<String>,
    overprovision_ratio: Option<Written>,
    default: Option<bool>,
    block_size: Option<u32>,
    kata_partition: Option<bool>,
    placement: Option<String>,
}

/// A number, as it is or between quotes.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Whole(i64),
    /// Shows as the shortest decimal number that it is, which is the one in the file.
    Decimal(f64),
}

impl Written {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Whole(whole) => whole.to_string(),
            Self::Decimal(decimal) => decimal.to_string(),
        }
    }
}

impl FileClass {
    fn checked(self, names: &Names) -> Result<Class, Error> {
        let is_label = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let fits = (1..=MAX_STRING).contains(&self.name.len());
        if !fits || !self.name.chars().all(is_label) {
            let allowed = "1 to 128 letters, digits, dashes, dots and underscores";
            return Err(Error::invalid("class.name", &self.name, allowed));
        }
        let field = |key: &str| format!("class {}: {key}", self.name);
        let kind = match self.kind.as_deref() {
            None => Kind::Thin,
            Some(name) => Kind::of_name(name).ok_or_else(|| {
                let allowed = "thin, thick, pmem-pooled or pmem-direct";
                Error::invalid(field("kind"), name, allowed)
            })?,
        };
        let (pool, others) = self.checked_pools(names, kind)?;
        let ratio = match &self.overprovision_ratio {
            None => None,
            Some(ratio) if matches!(kind, Kind::Thick | Kind::PmemDirect) => {
                let allowed =
                    format!("left out: a {} class provisions only existing space", kind.name());
                return Err(Error::invalid(field("overprovision_ratio"), ratio.text(), allowed));
            }
            Some(ratio) => Some(Ratio::parse(&field("overprovision_ratio"), &ratio.text())?),
        };
        let is_thick = kind == Kind::Thick || (kind == Kind::PmemPooled && ratio.is_none());
        let usual = if kind == Kind::Thin { Ratio::TWO } else { Ratio::ONE };
        let block_size = self.block_size.unwrap_or_default();
        if block_size != 0 && !(block_size.is_power_of_two() && (512..=4096).contains(&block_size))
        {
            let allowed = "512, 1024, 2048 or 4096";
            return Err(Error::invalid(field("block_size"), block_size, allowed));
        }
        let kata_partition = self.kata_partition.unwrap_or_default();
        if kata_partition && kind != Kind::PmemDirect {
            let allowed = "left out: images for virtual machines need a class of kind pmem-direct";
            return Err(Error::invalid(field("kata_partition"), "true", allowed));
        }
        let placement = match &self.placement {
            None => None,
            Some(text) if kind == Kind::PmemDirect => {
                let allowed = "left out: a volume of a pmem-direct class is in one piece";
                return Err(Error::invalid(field("placement"), text, allowed));
            }
            Some(text) => Some(Placement::parse(field("placement"), text)?),
        };
        Ok(Class {
            name: self.name,
            pool,
            others,
            kind,
            is_thick,
            overprovision_ratio: ratio.unwrap_or(usual),
            is_default: self.default.unwrap_or_default(),
            block_size,
            kata_partition,
            placement,
        })
    }

    /// Its pool, and those of further regions.
    fn checked_pools(&self, names: &Names, kind: Kind) -> Result<(String, Vec<String>), Error> {
        let field = |key: &str| format!("class {}: {key}", self.name);
        let check = |key: &str, pool: &str| {
            names.check_pool(&field(key), pool)?;
            if pool.contains('/') || pool.chars().any(char::is_control) {
                return Err(Error::invalid(field(key), pool, "the name of a pool"));
            }
            Ok(())
        };
        let single = self.pool.clone().unwrap_or_default();
        check("pool", &single)?;
        let Some(pools) = &self.pools else { return Ok((single, Vec::new())) };
        let shown = || pools.join(", ");
        if !kind.is_pmem() || self.pool.is_some() {
            let allowed = "left out: several pools, in place of one, are for regions of persistent \
                           memory";
            return Err(Error::invalid(field("pools"), shown(), allowed));
        }
        let different: BTreeSet<&String> = pools.iter().collect();
        let is_fine = different.len() == pools.len() && pools.len() <= MAX_POOLS;
        let (Some((first, others)), true) = (pools.split_first(), is_fine) else {
            let allowed = format!("1 to {MAX_POOLS} names of pools, each once");
            return Err(Error::invalid(field("pools"), shown(), allowed));
        };
        for pool in pools {
            check("pools", pool)?;
            if pool.is_empty() {
                return Err(Error::invalid(field("pools"), shown(), "names of pools"));
            }
        }
        Ok((first.clone(), others.to_vec()))
    }
}
