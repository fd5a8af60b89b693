//! Users of the devices of namespaces.
//!
//! A process that ends during the scan is not a user. One that cannot be examined is counted:
//! unseen users are not taken for none.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::Places;
use super::error::PlatformError;
use super::namespace::DeviceClass;
use super::region::Region;
use super::sysfs::Folder;

/// One that uses a device.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum User {
    /// A file system is mounted from it, or its node is shown somewhere else.
    Mount {
        /// Where.
        point: String,
    },
    /// Another block device is made of it.
    Holder(String),
    /// Swap.
    Swap,
    /// A process has it open or mapped.
    Process {
        /// Its number.
        pid: u32,
        /// Its name.
        name: String,
    },
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount { point } => write!(f, "mounted at {point}"),
            Self::Holder(name) => write!(f, "part of block device {name}"),
            Self::Swap => f.write_str("swapped to"),
            Self::Process { pid, name } => write!(f, "open in process {pid} ({name})"),
        }
    }
}

/// A device that is looked for.
struct Wanted {
    region: usize,
    namespace: usize,
    /// The paths of it and its partitions.
    paths: Vec<String>,
    numbers: Vec<(u32, u32)>,
    found: BTreeSet<User>,
}

impl Wanted {
    fn is_path(&self, path: &str) -> bool {
        self.paths.iter().any(|own| own == path)
    }
}

/// Writes users into all namespaces, and returns how many processes could not be examined.
pub(super) fn find(places: &Places, regions: &mut [Region]) -> Result<usize, PlatformError> {
    let mut wanted = Vec::new();
    for (region, of) in regions.iter().enumerate() {
        for (namespace, one) in of.namespaces.iter().enumerate() {
            let Some(device) = &one.device else { continue };
            let parts = || device.partitions.iter();
            let paths = std::iter::once(&device.name).chain(parts().map(|part| &part.0));
            let paths = paths.map(|name| format!("/dev/{name}")).collect();
            let numbers = std::iter::once(device.numbers).chain(parts().map(|part| part.1));
            let numbers = numbers.collect();
            let found = BTreeSet::new();
            let mut one = Wanted { region, namespace, paths, numbers, found };
            if device.class == DeviceClass::Block {
                holders(places, &device.name, &mut one)?;
            }
            wanted.push(one);
        }
    }
    if wanted.is_empty() {
        return Ok(0);
    }
    loops(places, &mut wanted)?;
    swaps(places, &mut wanted)?;
    let unseen = processes(places, &mut wanted)?;
    for one in wanted {
        let namespace = &mut regions[one.region].namespaces[one.namespace];
        namespace.users = one.found.into_iter().collect();
    }
    Ok(unseen)
}

fn holders(places: &Places, disk: &str, wanted: &mut Wanted) -> Result<(), PlatformError> {
    let folder = Folder::new(places.sys.join("class/block"));
    let names: Vec<String> =
        wanted.paths.iter().filter_map(|path| path.strip_prefix("/dev/")).map(Into::into).collect();
    for name in names {
        // A partition's folder is below its disk's as well, which is there in any case.
        let own = if name == disk { folder.at(disk) } else { folder.at(disk).at(&name) };
        let holders = own.at("holders").list_if_there()?.unwrap_or_default();
        wanted.found.extend(holders.into_iter().map(User::Holder));
    }
    Ok(())
}

/// A loop device is no holder, and no process has its backing file open.
fn loops(places: &Places, wanted: &mut [Wanted]) -> Result<(), PlatformError> {
    let folder = Folder::new(places.sys.join("block"));
    for name in folder.list_if_there()?.unwrap_or_default() {
        if !super::is_numbered(&name, "loop") {
            continue;
        }
        let Some(path) = folder.at(&name).text_if_there("loop/backing_file")? else { continue };
        for one in wanted.iter_mut().filter(|one| one.is_path(&path)) {
            one.found.insert(User::Holder(name.clone()));
        }
    }
    Ok(())
}

fn swaps(places: &Places, wanted: &mut [Wanted]) -> Result<(), PlatformError> {
    let table = Folder::new(places.proc.clone()).text_if_there("swaps")?.unwrap_or_default();
    for path in table.lines().filter_map(|line| line.split_whitespace().next()) {
        for one in wanted.iter_mut().filter(|one| one.is_path(path)) {
            one.found.insert(User::Swap);
        }
    }
    Ok(())
}

fn processes(places: &Places, wanted: &mut [Wanted]) -> Result<usize, PlatformError> {
    let mut unseen = 0;
    let mut seen_mounts = BTreeSet::new();
    for name in Folder::new(places.proc.clone()).list()? {
        let Ok(pid) = name.parse::<u32>() else { continue };
        let folder = places.proc.join(&name);
        let looked = [
            mounts(&places.proc, &folder, &mut seen_mounts, wanted),
            open_files(&folder, pid, wanted),
            mapped_files(&folder, pid, wanted),
        ];
        let mut was_unseen = false;
        for one in looked {
            match one {
                Ok(()) => {}
                Err(error) if has_ended(&error) => {}
                Err(error) if error.kind() == ErrorKind::PermissionDenied => was_unseen = true,
                Err(source) => return Err(PlatformError::Read { path: folder, source }),
            }
        }
        unseen += usize::from(was_unseen);
    }
    Ok(unseen)
}

fn has_ended(error: &io::Error) -> bool {
    let gone = rustix::io::Errno::SRCH.raw_os_error();
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(gone)
}

/// Mount tables are as many as there are namespaces of mounts.
fn mounts(
    proc: &Path,
    folder: &Path,
    seen: &mut BTreeSet<(PathBuf, Option<PathBuf>)>,
    wanted: &mut [Wanted],
) -> io::Result<()> {
    let table = fs::read_link(folder.join("ns/mnt")).unwrap_or_default();
    let users = |folder: &Path| fs::read_link(folder.join("ns/user")).ok();
    let own = (table, users(folder));
    if !own.0.as_os_str().is_empty() && seen.contains(&own) {
        return Ok(());
    }
    let table = match fs::read_to_string(folder.join("mountinfo")) {
        // Kernel threads have no open files.
        Err(error) if error.kind() == ErrorKind::InvalidInput => return Ok(()),
        other => other?,
    };
    // In its own user namespace any process can bind nodes without the right to open them. A real
    // use of a node is in a mount table of the host, too.
    let may_open = match (&own.1, users(&proc.join("self"))) {
        (Some(theirs), Some(ours)) => *theirs == ours,
        _ => true,
    };
    seen.insert(own);
    for line in table.lines() {
        let mut words = line.split(' ');
        let first = (words.nth(2), words.next(), words.next());
        let (Some(numbers), Some(root), Some(point)) = first else { continue };
        let mut words = words.skip_while(|word| *word != "-").skip(1);
        let kind = words.next().unwrap_or_default();
        let source = words.next().unwrap_or_default();
        // A node alone is bound elsewhere, as for a raw volume, whose user may open it at any time,
        // even after it was removed.
        let root = root.strip_suffix("//deleted").unwrap_or(root);
        let node = (may_open && kind == "devtmpfs").then(|| format!("/dev{root}"));
        for one in wanted.iter_mut() {
            let by_number = one.numbers.iter().any(|own| format!("{}:{}", own.0, own.1) == numbers);
            let is_node = node.as_deref().is_some_and(|node| one.is_path(node));
            if by_number || is_node || one.is_path(source) {
                one.found.insert(User::Mount { point: point.to_owned() });
            }
        }
    }
    Ok(())
}

fn open_files(folder: &Path, pid: u32, wanted: &mut [Wanted]) -> io::Result<()> {
    for entry in fs::read_dir(folder.join("fd"))? {
        let path = entry?.path();
        let target = match fs::read_link(&path) {
            Err(error) if has_ended(&error) => continue,
            other => other?,
        };
        // Only paths among devices are examined themselves: examining a file on a network file
        // system could wait for its server.
        let text = target.to_string_lossy();
        let numbers = text.starts_with("/dev/").then(|| fs::metadata(&path).ok()).flatten();
        let numbers =
            numbers.map(|data| (rustix::fs::major(data.rdev()), rustix::fs::minor(data.rdev())));
        for one in wanted.iter_mut() {
            let is_it = one.is_path(&text) || numbers.is_some_and(|own| one.numbers.contains(&own));
            if is_it {
                one.found.insert(User::Process { pid, name: name_of(folder) });
            }
        }
    }
    Ok(())
}

/// A mapping outlives the open file that it was made of.
fn mapped_files(folder: &Path, pid: u32, wanted: &mut [Wanted]) -> io::Result<()> {
    let table = fs::read_to_string(folder.join("maps"))?;
    for path in table.lines().filter_map(|line| line.find('/').map(|at| &line[at..])) {
        for one in wanted.iter_mut().filter(|one| one.is_path(path)) {
            one.found.insert(User::Process { pid, name: name_of(folder) });
        }
    }
    Ok(())
}

fn name_of(folder: &Path) -> String {
    fs::read_to_string(folder.join("comm")).unwrap_or_default().trim().to_owned()
}
