//! Regions: a range of memory that the platform interleaves.

use std::fmt;
use std::ops::Range;

use super::Places;
use super::error::PlatformError;
use super::key::RegionKey;
use super::namespace::{self, Namespace};
use super::sysfs::Folder;
use crate::media::Domain;

/// Interleave sets of today have at most 16 ways; more is taken for a damaged file.
const MAX_WAYS: u64 = 256;

/// The kind of memory of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionKind {
    /// Persistent memory.
    Pmem,
    /// Ordinary memory that is presented like persistent memory.
    Volatile,
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pmem => "pmem",
            Self::Volatile => "volatile",
        })
    }
}

/// One module of a region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dimm {
    /// The kernel's present name.
    pub name: String,
    /// The manufacturer's id; none if the platform does not report it.
    pub id: Option<String>,
}

/// A region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    /// Which one: the same after every boot.
    pub key: RegionKey,
    /// The kernel's present name.
    pub name: String,
    /// The kind of its memory.
    pub kind: RegionKind,
    /// Bytes in all.
    pub size: u64,
    /// Bytes that no namespace has.
    pub available: u64,
    /// Bytes of the largest piece of those; all of them where the kernel does not say.
    pub max_available_extent: u64,
    /// Sizes and offsets of namespaces are multiples of this; old kernels do not report it.
    pub align: Option<u64>,
    /// The node of processors that it is near to.
    pub numa_node: Option<u32>,
    /// How far stores have to go.
    pub domain: Domain,
    /// Modules that it is interleaved over.
    pub ways: u64,
    /// The modules of the region.
    pub dimms: Vec<Dimm>,
    /// Bytes that are known to be bad, from the region's start.
    pub bad_blocks: Vec<Range<u64>>,
    /// Its driver is bound. Without it the kernel shows none of its namespaces, which are there
    /// all the same.
    pub enabled: bool,
    /// Whether the region is read-only.
    pub read_only: bool,
    /// Namespaces are kept in labels, so that there may be many, with names.
    pub labelled: bool,
    /// Without those that the kernel holds ready to be made.
    pub namespaces: Vec<Namespace>,
}

impl Region {
    /// Why a namespace that is not seen in it may be there all the same, if so.
    #[must_use]
    pub fn hides(&self) -> Option<&'static str> {
        if !self.enabled {
            // By ndctl, as its modules are locked, or as its driver failed.
            return Some("is not enabled");
        }
        // Modules whose labels can't be read count as those that have none.
        (!self.labelled).then_some("has no labels now")
    }

    pub(super) fn namespaces_of(region: &Self) -> impl Iterator<Item = &Namespace> {
        region.namespaces.iter()
    }
}

/// Types of namespaces that a region can have, as the kernel numbers them.
const LABEL_LESS: u64 = 4;
const LABELLED: u64 = 5;

/// Reads one, which was enabled before, or not.
pub(super) fn read(
    places: &Places,
    name: &str,
    was_enabled: bool,
) -> Result<Region, PlatformError> {
    let folder = Folder::new(places.nd_devices().join(name));
    let ways = folder.number("mappings")?;
    if ways > MAX_WAYS {
        return Err(folder.malformed("mappings", &ways.to_string(), "a number up to 256"));
    }
    let dimms = dimms(places, &folder, ways)?;
    let key = key(places, &folder, &dimms)?;
    let devtype = folder.text("devtype")?;
    let kind = match devtype.as_str() {
        "nd_pmem" => RegionKind::Pmem,
        "nd_volatile" => RegionKind::Volatile,
        other => return Err(folder.malformed("devtype", other, "nd_pmem or nd_volatile")),
    };
    let nstype = folder.number("nstype")?;
    let labelled = match nstype {
        LABEL_LESS => false,
        LABELLED => true,
        other => return Err(folder.malformed("nstype", &other.to_string(), "4 or 5")),
    };
    // Where there are no labels the one namespace is as large as its region, and the kernel has no
    // such file.
    let available = match labelled {
        true => folder.number("available_size")?,
        false => folder.number_if_there("available_size")?.unwrap_or(0),
    };
    let largest = folder.number_if_there("max_available_extent")?;
    let namespaces = namespace::read_all(places, &folder, &key)?;
    // The link goes before the namespaces do: looks before and after say that those were all.
    let enabled = was_enabled && folder.has_link("driver")?;
    Ok(Region {
        name: name.to_owned(),
        kind,
        size: folder.number("size")?,
        available,
        max_available_extent: largest.unwrap_or(available).min(available),
        align: folder.number_if_there("align")?.filter(|align| *align > 0),
        numa_node: numa_node(&folder)?,
        domain: domain(&folder)?,
        ways: ways.max(1),
        dimms,
        bad_blocks: folder.bad_blocks()?,
        read_only: folder.number_if_there("read_only")?.unwrap_or(0) != 0,
        labelled,
        enabled,
        namespaces,
        key,
    })
}

/// The kernel writes -1 where there is none.
fn numa_node(folder: &Folder) -> Result<Option<u32>, PlatformError> {
    let name = "numa_node";
    match folder.text_if_there(name)? {
        None => Ok(None),
        Some(text) if text == "-1" => Ok(None),
        Some(text) => {
            let node = text.parse().map_err(|_| folder.malformed(name, &text, "a node's number"));
            node.map(Some)
        }
    }
}

/// The file is not there where the platform said nothing.
fn domain(folder: &Folder) -> Result<Domain, PlatformError> {
    let name = "persistence_domain";
    Ok(match folder.text_if_there(name)?.as_deref() {
        Some("cpu_cache") => Domain::CpuCache,
        Some("memory_controller") => Domain::MemoryController,
        None | Some("unknown" | "") => Domain::Unknown,
        Some(other) => {
            let expected = "cpu_cache, memory_controller or unknown";
            return Err(folder.malformed(name, other, expected));
        }
    })
}

fn dimms(places: &Places, folder: &Folder, ways: u64) -> Result<Vec<Dimm>, PlatformError> {
    let mut dimms = Vec::new();
    for at in 0..ways {
        let file = format!("mapping{at}");
        let text = folder.text(&file)?;
        let name = text.split(',').next().unwrap_or_default();
        if !super::is_numbered(name, "nmem") {
            return Err(folder.malformed(&file, &text, "nmemN,start,size,position"));
        }
        let dimm = Folder::new(places.nd_devices().join(name));
        let mut id = None;
        for file in ["nfit/id", "cxl/id", "papr/unique_id"] {
            if id.is_none() {
                id = dimm.text_if_set(file)?.filter(|id| !id.is_empty());
            }
        }
        dimms.push(Dimm { name: name.to_owned(), id });
    }
    Ok(dimms)
}

/// The cookie of the set. Where there is none, or 0, its provider and the ids of its modules; and
/// where there are no modules either, where it lies in memory.
fn key(places: &Places, folder: &Folder, dimms: &[Dimm]) -> Result<RegionKey, PlatformError> {
    match folder.number_if_set("set_cookie")? {
        Some(cookie) if cookie != 0 => return Ok(RegionKey::Cookie(cookie)),
        _ => {}
    }
    let provider = provider(places, folder)?;
    let ids: Option<Vec<&str>> = dimms.iter().map(|dimm| dimm.id.as_deref()).collect();
    let parts = match ids {
        Some(ids) if !ids.is_empty() => ids.join(","),
        _ => {
            let at = folder.number("resource")?;
            format!("{at:#x}")
        }
    };
    let parts: String = format!("{provider}:{parts}").split_whitespace().collect();
    Ok(RegionKey::Parts(parts))
}

/// The bus that a region hangs on is the folder above it.
fn provider(places: &Places, folder: &Folder) -> Result<String, PlatformError> {
    let path = folder.path();
    let real = std::fs::canonicalize(path)
        .map_err(|source| PlatformError::Read { path: path.to_path_buf(), source })?;
    let above = real.parent().unwrap_or(&places.sys);
    Folder::new(above.to_path_buf()).text("provider")
}

/// Refuses two regions with the same key, which could not be distinguished.
pub(super) fn check_keys(regions: &[Region]) -> Result<(), PlatformError> {
    for pair in regions.windows(2) {
        if pair[0].key == pair[1].key {
            let (one, other) = (&pair[0].name, &pair[1].name);
            return Err(PlatformError::Unsupported {
                what: format!("{one} and {other}"),
                problem: format!("both have the key {}, so that neither can be used", pair[0].key),
            });
        }
    }
    Ok(())
}
