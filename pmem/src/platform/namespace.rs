//! Namespaces: parts of a region, each with one of four kinds of device.

use std::fmt;
use std::ops::Range;

use super::error::PlatformError;
use super::key::{RegionKey, Uuid};
use super::sysfs::{Folder, SECTOR};
use super::users::User;
use super::{Places, is_numbered};

/// The mode of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// A block device of bare memory, without DAX for file systems.
    Raw,
    /// A block device whose file systems can map their files.
    Fsdax,
    /// A character device that is mapped as a whole.
    Devdax,
    /// A block device that never tears a sector.
    Sector,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Fsdax => "fsdax",
            Self::Devdax => "devdax",
            Self::Sector => "sector",
        })
    }
}

/// The place of the kernel's page metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageMap {
    /// On the namespace itself: it takes some 1.6 % of it.
    Device,
    /// In ordinary memory.
    Memory,
}

impl fmt::Display for PageMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "dev",
            Self::Memory => "mem",
        })
    }
}

/// The kind of a device's node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceClass {
    /// A block device.
    Block,
    /// A character device.
    Character,
}

/// The device of a namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its name in the folder of nodes.
    pub name: String,
    /// The kind of that node.
    pub class: DeviceClass,
    /// Major and minor number.
    pub numbers: (u32, u32),
    /// Its partitions: names and numbers.
    pub partitions: Vec<(String, (u32, u32))>,
}

impl Device {
    /// Where its node usually is.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/dev/{}", self.name)
    }
}

/// A namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Namespace {
    /// The kernel's present name.
    pub name: String,
    /// Which one. One without labels has that of the device made of it, and a raw one none.
    pub uuid: Option<Uuid>,
    /// The alternative name that an administrator gave it. Other namespaces may have the same.
    pub alt_name: String,
    /// Its mode.
    pub mode: Mode,
    /// Where the pages are noted, of those that have pages.
    pub map: Option<PageMap>,
    /// Its first byte, from its region's start; none if the kernel reports it to root only.
    pub start: Option<u64>,
    /// Bytes that it takes of its region.
    pub size: u64,
    /// Bytes that its device has; unknown while it has none.
    pub usable: Option<u64>,
    /// The alignment of mappings, for namespaces that have pages.
    pub align: Option<u64>,
    /// The region that it is in.
    pub region: RegionKey,
    /// Its device, while there is one.
    pub device: Option<Device>,
    /// The name of the kernel device that claims it; none for a raw one.
    pub holder: Option<String>,
    /// Bytes of its device that are known to be bad.
    pub bad_blocks: Vec<Range<u64>>,
    /// Its users, if they were requested.
    pub users: Vec<User>,
}

/// The name of a namespace in messages.
impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.uuid {
            Some(uuid) => write!(f, "namespace {uuid} ({})", self.name),
            None => write!(f, "namespace {} of region {}", self.name, self.region),
        }
    }
}

/// All namespaces of a region, without seeds: those have no size.
pub(super) fn read_all(
    places: &Places,
    region: &Folder,
    key: &RegionKey,
) -> Result<Vec<Namespace>, PlatformError> {
    let mut found = Vec::new();
    for name in region.list()? {
        let is_one = name.split_once('.').is_some_and(|(first, second)| {
            is_numbered(first, "namespace") && second.bytes().all(|byte| byte.is_ascii_digit())
        });
        if is_one && let Some(namespace) = read(places, region, &name, key)? {
            found.push(namespace);
        }
    }
    found.sort_by(|a, b| a.uuid.cmp(&b.uuid).then_with(|| a.name.cmp(&b.name)));
    Ok(found)
}

fn read(
    places: &Places,
    region: &Folder,
    name: &str,
    key: &RegionKey,
) -> Result<Option<Namespace>, PlatformError> {
    let folder = region.at(name);
    let size = folder.number("size")?;
    if size == 0 {
        return Ok(None);
    }
    let holder = folder.text_if_there("holder")?.filter(|name| !name.is_empty());
    let claim = holder.as_deref().map(|holder| region.at(holder));
    let mode = mode(&folder, holder.as_deref())?;
    let mut namespace = Namespace {
        name: name.to_owned(),
        uuid: uuid(&folder)?,
        alt_name: folder.text_if_there("alt_name")?.unwrap_or_default(),
        mode,
        map: None,
        start: start(region, &folder)?,
        size,
        usable: None,
        align: None,
        region: key.clone(),
        device: None,
        holder,
        bad_blocks: Vec::new(),
        users: Vec::new(),
    };
    if let Some(claim) = &claim {
        claimed(&mut namespace, claim)?;
    }
    let carrier = claim.as_ref().unwrap_or(&folder);
    if mode == Mode::Devdax {
        character(places, &mut namespace, carrier)?;
    } else {
        block(&mut namespace, carrier)?;
    }
    Ok(Some(namespace))
}

/// Where it begins in its region, by the addresses of both.
fn start(region: &Folder, folder: &Folder) -> Result<Option<u64>, PlatformError> {
    let (base, own) = (region.address()?, folder.address()?);
    Ok(base.zip(own).and_then(|(base, own)| own.checked_sub(base)))
}

fn uuid(folder: &Folder) -> Result<Option<Uuid>, PlatformError> {
    let name = "uuid";
    let text = folder.text_if_there(name)?.filter(|text| !text.is_empty());
    text.map(|text| folder.value(name, &text)).transpose()
}

/// Returns the mode, by its holder; the kernel's own value is the same for fsdax and for bare
/// memory that has pages.
fn mode(folder: &Folder, holder: Option<&str>) -> Result<Mode, PlatformError> {
    let Some(holder) = holder else { return Ok(Mode::Raw) };
    let word: String = holder.chars().take_while(char::is_ascii_alphabetic).collect();
    match word.as_str() {
        "pfn" => Ok(Mode::Fsdax),
        "dax" => Ok(Mode::Devdax),
        "btt" => Ok(Mode::Sector),
        _ => Err(folder.malformed("holder", holder, "pfn, dax or btt and a number")),
    }
}

fn claimed(namespace: &mut Namespace, claim: &Folder) -> Result<(), PlatformError> {
    if namespace.uuid.is_none() {
        namespace.uuid = uuid(claim)?;
    }
    if namespace.mode == Mode::Sector {
        return Ok(());
    }
    namespace.align = claim.number_if_there("align")?.filter(|align| *align > 0);
    let name = "mode";
    namespace.map = match claim.text(name)?.as_str() {
        "ram" => Some(PageMap::Memory),
        "pmem" => Some(PageMap::Device),
        "none" => None,
        other => return Err(claim.malformed(name, other, "ram, pmem or none")),
    };
    Ok(())
}

fn numbers(folder: &Folder) -> Result<(u32, u32), PlatformError> {
    let text = folder.text("dev")?;
    let numbers = text
        .split_once(':')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    numbers.ok_or_else(|| folder.malformed("dev", &text, "MAJOR:MINOR"))
}

fn block(namespace: &mut Namespace, carrier: &Folder) -> Result<(), PlatformError> {
    let blocks = carrier.at("block");
    let Some(names) = blocks.list_if_there()? else { return Ok(()) };
    let Some(name) = names.into_iter().next() else { return Ok(()) };
    let folder = blocks.at(&name);
    let sectors = folder.number("size")?;
    let bytes = sectors.checked_mul(SECTOR);
    let bytes = bytes
        .ok_or_else(|| folder.malformed("size", &sectors.to_string(), "sectors of a device"))?;
    namespace.usable = Some(bytes);
    namespace.bad_blocks = folder.bad_blocks()?;
    let mut partitions = Vec::new();
    for part in folder.list()?.into_iter().filter(|part| part.starts_with(&name)) {
        let numbers = numbers(&folder.at(&part))?;
        partitions.push((part, numbers));
    }
    let class = DeviceClass::Block;
    namespace.device = Some(Device { numbers: numbers(&folder)?, name, class, partitions });
    Ok(())
}

/// The device is below the holder of the namespace, beside files of its own.
fn character(
    places: &Places,
    namespace: &mut Namespace,
    carrier: &Folder,
) -> Result<(), PlatformError> {
    let is_one = |name: &&String| {
        name.strip_prefix("dax").and_then(|rest| rest.split_once('.')).is_some_and(|(a, b)| {
            [a, b].iter().all(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
        })
    };
    let names = carrier.list()?;
    let Some(name) = names.iter().find(is_one) else { return Ok(()) };
    // Of the kernel's two ways to it, this one is there in all versions.
    let folder = Folder::new(places.sys.join("bus/dax/devices").join(name));
    let Some(size) = folder.number_if_set("size")?.filter(|size| *size > 0) else { return Ok(()) };
    namespace.usable = Some(size);
    namespace.device = Some(Device {
        numbers: numbers(&folder)?,
        name: name.clone(),
        class: DeviceClass::Character,
        partitions: Vec::new(),
    });
    Ok(())
}
