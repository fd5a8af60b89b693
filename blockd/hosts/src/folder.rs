//! Cells as files in a folder of one machine, for one daemon or several. A lease is a note with the
//! number of the daemon that has the cell. It does not expire. Each daemon has a lock while its
//! process lives, and only a process that has ended counts as fenced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::statvfs::statvfs;
use parking_lot::Mutex;

use crate::cell::{Cell, CellName, Holder, HostNumber, Owner};
use crate::coordinator::{Coordinator, Space};
use crate::error::HostsError;
use crate::fence::{Fence, Key};
use crate::folder_lock::{HostLock, Noted, failed, noted, number};

/// Goes before a cell's name in the name of its file.
const PREFIX: &str = "cell-";
/// Goes after it in the name of the note that this host has it. No name of a cell has a `_`.
const HELD: &str = "_held";
/// And of the note that it is new.
const NEW: &str = "_new";
/// Goes before a host's number in the name of the file with its address.
const ADDRESS: &str = "host-";
/// And in that of the file with its node.
const NODE: &str = "node-";

/// A folder of cells. Clones have the same lock.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    host: HostNumber,
    /// Held only while it is looked at: a file system may not answer.
    lock: Arc<Mutex<Option<Arc<HostLock>>>>,
}

impl Folder {
    /// A folder by its path, as the daemon with this number sees it. Nothing is looked at.
    #[must_use]
    pub fn new(path: PathBuf, host: HostNumber) -> Self {
        Self { path, host, lock: Arc::default() }
    }

    /// This daemon's number.
    #[must_use]
    pub const fn host(&self) -> HostNumber {
        self.host
    }

    /// Takes this daemon's number, until its process ends. `incarnation` is drawn anew for each
    /// process, and makes its key. `is_known`: this host has used the group before. Nothing is
    /// changed where this process has the number. Not to be called twice at one time.
    ///
    /// # Errors
    /// If another process has the number, or the folder of a known group has none of its files.
    pub fn enter(&self, incarnation: u32, is_known: bool) -> Result<(), HostsError> {
        // The place where its file system is mounted is a folder, too, and a lock there one for
        // nothing.
        if let Some(lock) = self.own_lock() {
            return self.is_there(lock.is_in_place()?);
        }
        self.is_there(!is_known || self.is_used()?)?;
        let Some(lock) = HostLock::take(&self.path, self.host)? else {
            let problem = format!(
                "has another daemon with the number {}, which runs: give this one another (--host)",
                self.host
            );
            return Err(HostsError::Unsuitable { group: self.path.display().to_string(), problem });
        };
        lock.note(Some(Noted { key: Key::new(self.host, incarnation), is_fenced: false }))?;
        *self.lock.lock() = Some(Arc::new(lock));
        self.sync()
    }

    fn is_there(&self, is_there: bool) -> Result<(), HostsError> {
        if is_there {
            return Ok(());
        }
        let problem = "does not have the group's files: mount its file system, or remove the \
                       group (`blockd vg remove`) and add it again";
        let (group, problem) = (self.path.display().to_string(), problem.to_owned());
        Err(HostsError::Unsuitable { group, problem })
    }

    /// Refuses while the file system that this daemon has entered is not mounted: what is in its
    /// place looks like a group without cells.
    fn is_still_there(&self) -> Result<(), HostsError> {
        match self.own_lock() {
            Some(lock) => self.is_there(lock.is_in_place()?),
            None => Ok(()),
        }
    }

    fn own_lock(&self) -> Option<Arc<HostLock>> {
        self.lock.lock().clone()
    }

    /// Whether the folder has any file of a group. Older releases wrote none for each host.
    fn is_used(&self) -> Result<bool, HostsError> {
        for entry in fs::read_dir(&self.path).map_err(failed("read", &self.path))? {
            let name = entry.map_err(failed("read", &self.path))?.file_name();
            let begins = |prefix| name.to_str().is_some_and(|name| name.starts_with(prefix));
            if [PREFIX, ADDRESS, NODE].into_iter().any(begins) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether this process has the daemon's number.
    #[must_use]
    pub fn is_entered(&self) -> bool {
        self.lock.lock().is_some()
    }

    /// Whether a process has the number of another host; `None` where none has had it, or only one
    /// of an older release, which takes no lock.
    ///
    /// # Errors
    /// If its lock can't be tried.
    pub fn is_running(&self, host: HostNumber) -> Result<Option<bool>, HostsError> {
        // No file is made for a number that no daemon has had.
        match noted(&self.path, host)? {
            Some(_) => HostLock::take(&self.path, host).map(|lock| Some(lock.is_none())),
            None => Ok(None),
        }
    }

    /// The lock of a host whose process has ended. None begins while the caller has it.
    fn ended(&self, host: HostNumber) -> Result<HostLock, HostsError> {
        let problem = "has a daemon that runs, and is fenced by its end alone: stop it first";
        let running = || HostsError::Unsuitable {
            group: format!("host {host} of {}", self.path.display()),
            problem: problem.to_owned(),
        };
        HostLock::take(&self.path, host)?.ok_or_else(running)
    }

    fn address_file(&self, host: HostNumber) -> PathBuf {
        self.path.join(format!("{ADDRESS}{host}"))
    }

    fn node_file(&self, host: HostNumber) -> PathBuf {
        self.path.join(format!("{NODE}{host}"))
    }

    fn file(&self, name: &CellName) -> PathBuf {
        self.path.join(format!("{PREFIX}{name}"))
    }

    fn note(&self, name: &CellName, note: &str) -> PathBuf {
        self.path.join(format!("{PREFIX}{name}{note}"))
    }

    fn remove_note(&self, name: &CellName, note: &str) -> Result<(), HostsError> {
        let note = self.note(name, note);
        match fs::remove_file(&note) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", &note)(error))
            }
            _ => self.sync(),
        }
    }

    fn make_note(&self, name: &CellName, note: &str) -> Result<(), HostsError> {
        let note = self.note(name, note);
        File::create(&note).map_err(failed("make", &note))?;
        self.sync()
    }

    fn cell(&self, name: &CellName) -> Result<Cell, HostsError> {
        self.is_still_there()?;
        let path = self.file(name);
        let size = match fs::metadata(&path) {
            Ok(found) => found.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let (cell, group) = (name.clone(), self.path.display().to_string());
                return Err(HostsError::NotFound { cell, group });
            }
            Err(error) => return Err(failed("examine", &path)(error)),
        };
        let holder = self.holder(name)?;
        let is_new = self.note(name, NEW).exists();
        Ok(Cell { name: name.clone(), size, path, holder, is_new })
    }

    fn holder(&self, name: &CellName) -> Result<Holder, HostsError> {
        let note = self.note(name, HELD);
        let text = match fs::read_to_string(&note) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Holder::Free),
            Err(error) => return Err(failed("read", &note)(error)),
        };
        // Older versions wrote nothing, and knew one daemon.
        let number = if text.is_empty() { Ok(1) } else { text.trim().parse() };
        Ok(match number {
            Ok(number) if number == self.host.0 => Holder::This,
            Ok(number) => Holder::Other(Owner { host: HostNumber(number), generation: 0 }),
            Err(_) => Holder::Unknown(format!("{} has no number in it", note.display())),
        })
    }

    /// Writes a file whole, or not at all, and durably.
    fn write(&self, path: &Path, text: &str, replaces: bool) -> Result<(), HostsError> {
        let draft = PathBuf::from(format!("{}.{}.draft", path.display(), self.host));
        let write = || {
            let mut file = File::create(&draft)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            if replaces { fs::rename(&draft, path) } else { fs::hard_link(&draft, path) }
        };
        let written = write();
        if !replaces {
            let _ = fs::remove_file(&draft);
        }
        written.map_err(failed("make", path))?;
        self.sync()
    }

    fn held(&self, name: &CellName) -> Result<Cell, HostsError> {
        let cell = self.cell(name)?;
        match cell.holder {
            Holder::This => Ok(cell),
            _ => Err(HostsError::NotHeld { cell: name.clone() }),
        }
    }

    /// Makes it durable what was made or removed in the folder.
    fn sync(&self) -> Result<(), HostsError> {
        let folder = File::open(&self.path).and_then(|folder| folder.sync_all());
        folder.map_err(failed("write", &self.path))
    }

    fn has_room(&self, needed: u64) -> Result<(), HostsError> {
        let free = self.space()?.free;
        if needed > free {
            let group = self.path.display().to_string();
            return Err(HostsError::NoSpace { group, needed, free });
        }
        Ok(())
    }
}

impl Coordinator for Folder {
    fn cells(&self) -> Result<Vec<Cell>, HostsError> {
        self.is_still_there()?;
        let mut cells = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed("read", &self.path))? {
            let entry = entry.map_err(failed("read", &self.path))?;
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            if let Some(name) = name.and_then(CellName::parse) {
                cells.push(self.cell(&name)?);
            }
        }
        cells.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(cells)
    }

    fn cell_at(&self, path: &Path) -> Option<CellName> {
        let name = path.strip_prefix(&self.path).ok()?.to_str()?;
        CellName::parse(name.strip_prefix(PREFIX)?)
    }

    fn publish_key(&self, _: Key) -> Result<(), HostsError> {
        Ok(())
    }

    fn keys(&self) -> Result<Vec<Key>, HostsError> {
        let mut keys = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed("read", &self.path))? {
            let entry = entry.map_err(failed("read", &self.path))?;
            if let Some(host) = entry.file_name().to_str().and_then(number) {
                keys.extend(noted(&self.path, host)?.map(|noted| noted.key));
            }
        }
        Ok(keys)
    }

    fn forget_host(&self, host: HostNumber, key: Option<Key>) -> Result<(), HostsError> {
        let lock = self.ended(host)?;
        if lock.noted()?.map(|noted| noted.key) != key {
            return Err(HostsError::CameBack { host });
        }
        for file in [self.address_file(host), self.node_file(host)] {
            match fs::remove_file(&file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed("remove", &file)(error));
                }
                _ => {}
            }
        }
        lock.note(None)?;
        self.sync()
    }

    fn holds(&self, path: &Path) -> bool {
        match self.cell_at(path).map(|name| self.cell(&name)) {
            Some(Ok(cell)) => cell.holder == Holder::This,
            None | Some(Err(HostsError::NotFound { .. })) => false,
            // A folder that can't be read says nothing.
            Some(Err(_)) => true,
        }
    }

    fn publish_address(&self, host: HostNumber, address: &str) -> Result<(), HostsError> {
        let path = self.address_file(host);
        if fs::read_to_string(&path).unwrap_or_default() == address {
            return Ok(());
        }
        self.write(&path, address, true)
    }

    fn address_of(&self, host: HostNumber) -> Result<Option<String>, HostsError> {
        let path = self.address_file(host);
        match fs::read_to_string(&path) {
            Ok(address) => Ok(Some(address).filter(|address| !address.is_empty())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", &path)(error)),
        }
    }

    fn publish_node(&self, host: HostNumber, node: u32) -> Result<(), HostsError> {
        let (path, text) = (self.node_file(host), format!("{node:08x}"));
        if fs::read_to_string(&path).unwrap_or_default() == text {
            return Ok(());
        }
        self.write(&path, &text, true)
    }

    fn nodes(&self) -> Result<Vec<(HostNumber, u32)>, HostsError> {
        let mut nodes = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed("read", &self.path))? {
            let entry = entry.map_err(failed("read", &self.path))?;
            let name = entry.file_name();
            let host = name.to_str().and_then(|name| name.strip_prefix(NODE)?.parse().ok());
            let Some(host) = host.map(HostNumber) else { continue };
            let path = self.node_file(host);
            let text = fs::read_to_string(&path).map_err(failed("read", &path))?;
            nodes.extend(u32::from_str_radix(&text, 16).ok().map(|node| (host, node)));
        }
        Ok(nodes)
    }

    fn space(&self) -> Result<Space, HostsError> {
        let found = statvfs(&self.path);
        let found = found.map_err(|errno| failed("examine", &self.path)(errno.into()))?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.fragment_size());
        Ok(Space { total: bytes(found.blocks()), free: bytes(found.blocks_available()) })
    }

    fn create(&self, name: &CellName, bytes: u64) -> Result<Cell, HostsError> {
        self.has_room(bytes)?;
        let path = self.file(name);
        if !path.exists() {
            self.make_note(name, NEW)?;
        }
        let made = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = match made {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let (cell, group) = (name.clone(), self.path.display().to_string());
                return Err(HostsError::Exists { cell, group });
            }
            Err(error) => return Err(failed("make", &path)(error)),
        };
        let sized = file.set_len(bytes).and_then(|()| file.sync_all());
        if let Err(error) = sized {
            let _ = fs::remove_file(&path);
            return Err(failed("make", &path)(error));
        }
        self.acquire(name)
    }

    fn finish(&self, name: &CellName) -> Result<(), HostsError> {
        self.held(name)?;
        self.remove_note(name, NEW)
    }

    fn mark_new(&self, name: &CellName) -> Result<(), HostsError> {
        self.held(name)?;
        self.make_note(name, NEW)
    }

    fn acquire(&self, name: &CellName) -> Result<Cell, HostsError> {
        let held = |cell: &Cell| match &cell.holder {
            Holder::Other(owner) => {
                Err(HostsError::Held { cell: name.clone(), by: Some(owner.host) })
            }
            Holder::Unknown(problem) => {
                Err(HostsError::NotKnown { cell: name.clone(), problem: problem.clone() })
            }
            Holder::This | Holder::Free => Ok(()),
        };
        let cell = self.cell(name)?;
        held(&cell)?;
        if cell.holder == Holder::Free {
            let written = self.write(&self.note(name, HELD), &self.host.to_string(), false);
            let cell = self.cell(name)?;
            // Another one may have been first.
            held(&cell)?;
            written?;
            return Ok(cell);
        }
        Ok(cell)
    }

    fn free(&self, name: &CellName, of: Owner) -> Result<(), HostsError> {
        // No process with that number begins meanwhile, and no other host frees the cell.
        let _ended = self.ended(of.host)?;
        match self.cell(name)?.holder {
            Holder::Other(owner) if owner == of => self.remove_note(name, HELD),
            _ => Ok(()),
        }
    }

    fn release(&self, name: &CellName) -> Result<(), HostsError> {
        match self.cell(name)?.holder {
            Holder::This => self.remove_note(name, HELD),
            _ => Ok(()),
        }
    }

    fn extend(&self, name: &CellName, bytes: u64) -> Result<u64, HostsError> {
        let cell = self.held(name)?;
        if cell.size >= bytes {
            return Ok(cell.size);
        }
        self.has_room(bytes - cell.size)?;
        let file = OpenOptions::new().write(true).open(&cell.path);
        let longer = file.and_then(|file| file.set_len(bytes).and_then(|()| file.sync_all()));
        longer.map_err(failed("extend", &cell.path))?;
        Ok(bytes)
    }

    fn remove(&self, name: &CellName) -> Result<(), HostsError> {
        let cell = self.held(name)?;
        fs::remove_file(&cell.path).map_err(failed("remove", &cell.path))?;
        self.remove_note(name, NEW)?;
        self.remove_note(name, HELD)
    }

    fn is_in_use(&self) -> Result<bool, HostsError> {
        Ok(false)
    }

    fn cut_off(&self) -> Result<(), HostsError> {
        Ok(())
    }
}

impl Fence for Folder {
    fn join(&self, _: Key, _: &[Key], _: bool) -> Result<(), HostsError> {
        Ok(())
    }

    fn is_member(&self, _: Key) -> Result<bool, HostsError> {
        Ok(true)
    }

    fn fence(&self, _: Key, other: Key) -> Result<bool, HostsError> {
        let lock = self.ended(other.host())?;
        match lock.noted()? {
            Some(noted) if noted.key == other && !noted.is_fenced => {
                lock.note(Some(Noted { is_fenced: true, ..noted }))?;
                Ok(true)
            }
            // The process with that key has ended, or there would be no lock.
            _ => Ok(false),
        }
    }

    fn leave(&self, _: Key) -> Result<(), HostsError> {
        match self.lock.lock().take() {
            Some(lock) => lock.note(None),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: HostNumber = HostNumber(1);
    const TWO: HostNumber = HostNumber(2);

    fn place() -> blockd_testkit::folder::Folder {
        blockd_testkit::folder::Folder::below(&std::env::temp_dir(), "folder-lock").unwrap()
    }

    #[test]
    fn only_a_process_that_has_ended_is_fenced_and_its_lease_ended() {
        let place = place();
        let daemon = |host| Folder::new(place.path().to_owned(), host);
        let (here, there) = (daemon(ONE), daemon(TWO));
        assert!(!here.is_entered());
        here.enter(1, false).unwrap();
        assert!(here.is_entered());
        assert_eq!(here.is_running(TWO).unwrap(), None, "no daemon has had the number");
        there.enter(7, false).unwrap();
        there.enter(8, false).unwrap();
        let keys = [Key::new(ONE, 1), Key::new(TWO, 7)];
        let mut found = here.keys().unwrap();
        found.sort();
        assert_eq!(found, keys);
        let name = CellName::parse("one").unwrap();
        let cell = there.create(&name, 4096).unwrap();
        assert!(there.holds(&cell.path) && !here.holds(&cell.path));
        let owner = Owner { host: TWO, generation: 0 };
        assert_eq!(here.is_running(TWO).unwrap(), Some(true));
        for error in [
            here.fence(keys[0], keys[1]).map(drop).unwrap_err(),
            here.free(&name, owner).unwrap_err(),
            here.forget_host(TWO, Some(keys[1])).unwrap_err(),
        ] {
            assert!(error.to_string().contains("has a daemon that runs"), "{error}");
        }
        let error = daemon(TWO).enter(9, false).unwrap_err().to_string();
        assert!(error.contains("has another daemon with the number 2"), "{error}");
        assert!(there.is_entered() && !daemon(TWO).is_entered());
        drop(there);
        assert_eq!(here.is_running(TWO).unwrap(), Some(false));
        for was_first in [true, false] {
            assert_eq!(here.fence(keys[0], keys[1]).unwrap(), was_first);
        }
        here.free(&name, Owner { host: HostNumber(3), generation: 0 }).unwrap();
        assert_eq!(here.cell(&name).unwrap().holder, Holder::Other(owner));
        here.free(&name, owner).unwrap();
        assert_eq!(here.acquire(&name).unwrap().holder, Holder::This);
    }

    #[test]
    fn the_folder_of_a_known_group_is_not_entered_while_it_is_not_mounted() {
        let place = place();
        let daemon = || Folder::new(place.path().to_owned(), ONE);
        let here = daemon();
        here.enter(1, false).unwrap();
        let away = place.path().with_extension("away");
        fs::rename(place.path(), &away).unwrap();
        fs::create_dir(place.path()).unwrap();
        // Neither by the daemon that has it, nor by the next one.
        for folder in [here, daemon()] {
            let error = folder.enter(2, true).unwrap_err().to_string();
            assert!(error.contains("does not have the group's files"), "{error}");
            assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "a file was made");
        }
        fs::remove_dir(place.path()).unwrap();
        fs::rename(&away, place.path()).unwrap();
        daemon().enter(2, true).unwrap();
    }

    #[test]
    fn a_daemon_that_comes_back_has_another_key_and_is_not_forgotten() {
        let place = place();
        let daemon = |host| Folder::new(place.path().to_owned(), host);
        let (here, there) = (daemon(ONE), daemon(TWO));
        here.enter(1, false).unwrap();
        there.enter(7, false).unwrap();
        there.publish_address(TWO, "127.0.0.1:1").unwrap();
        let key = Key::new(TWO, 7);
        drop(there);
        here.fence(Key::new(ONE, 1), key).unwrap();
        let there = daemon(TWO);
        there.enter(8, false).unwrap();
        assert!(here.keys().unwrap().contains(&Key::new(TWO, 8)));
        drop(there);
        let error = here.forget_host(TWO, Some(key)).unwrap_err();
        assert!(matches!(error, HostsError::CameBack { host: TWO }), "{error}");
        assert!(here.address_of(TWO).unwrap().is_some());
        here.publish_node(TWO, 9).unwrap();
        here.forget_host(TWO, Some(Key::new(TWO, 8))).unwrap();
        assert!(here.nodes().unwrap().is_empty());
        assert_eq!(here.keys().unwrap(), [Key::new(ONE, 1)]);
        assert_eq!(here.address_of(TWO).unwrap(), None);
        here.forget_host(TWO, None).unwrap();
    }
}
