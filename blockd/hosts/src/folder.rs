//! Cells as files in a folder of one machine, for one daemon or several. A lease is a note with the
//! number of the daemon that has the cell. It does not expire, and no daemon is ever fenced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;

use crate::cell::{Cell, CellName, Holder, HostNumber, Owner};
use crate::coordinator::{Coordinator, Space};
use crate::error::HostsError;
use crate::fence::Key;

/// Goes before a cell's name in the name of its file.
const PREFIX: &str = "cell-";
/// Goes after it in the name of the note that this host has it. No name of a cell has a `_`.
const HELD: &str = "_held";
/// And of the note that it is new.
const NEW: &str = "_new";
/// Goes before a host's number in the name of the file with its address.
const ADDRESS: &str = "host-";

/// A folder of cells.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    host: HostNumber,
}

impl Folder {
    /// A folder by its path, as the daemon with this number sees it. Nothing is looked at.
    #[must_use]
    pub const fn new(path: PathBuf, host: HostNumber) -> Self {
        Self { path, host }
    }

    /// This daemon's number.
    #[must_use]
    pub const fn host(&self) -> HostNumber {
        self.host
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
        Ok(Vec::new())
    }

    fn publish_address(&self, host: HostNumber, address: &str) -> Result<(), HostsError> {
        let path = self.path.join(format!("{ADDRESS}{host}"));
        if fs::read_to_string(&path).unwrap_or_default() == address {
            return Ok(());
        }
        self.write(&path, address, true)
    }

    fn address_of(&self, host: HostNumber) -> Result<Option<String>, HostsError> {
        let path = self.path.join(format!("{ADDRESS}{host}"));
        match fs::read_to_string(&path) {
            Ok(address) => Ok(Some(address).filter(|address| !address.is_empty())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", &path)(error)),
        }
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

    fn free(&self, _: &CellName, _: Owner) -> Result<(), HostsError> {
        Ok(())
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

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HostsError + use<> {
    let what = format!("{what} {}", path.display());
    move |source| HostsError::Io { what, source }
}
