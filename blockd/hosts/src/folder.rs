//! Cells as files in a folder of one host. No other host reaches them, so there are no leases
//! beyond this host's own note, and nothing is ever fenced.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;

use crate::cell::{Cell, CellName, Holder, Owner};
use crate::coordinator::{Coordinator, Space};
use crate::error::HostsError;
use crate::fence::Key;

/// Goes before a cell's name in the name of its file.
const PREFIX: &str = "cell-";
/// Goes after it in the name of the note that this host has it. No name of a cell has a `_`.
const HELD: &str = "_held";
/// And of the note that it is new.
const NEW: &str = "_new";

/// A folder of cells.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// A folder by its path. Nothing is looked at.
    #[must_use]
    pub const fn new(path: PathBuf) -> Self {
        Self { path }
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
        let holder = if self.note(name, HELD).exists() { Holder::This } else { Holder::Free };
        let is_new = self.note(name, NEW).exists();
        Ok(Cell { name: name.clone(), size, path, holder, is_new })
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
        self.cell(name)?;
        self.make_note(name, HELD)?;
        self.cell(name)
    }

    fn free(&self, _: &CellName, _: Owner) -> Result<(), HostsError> {
        Ok(())
    }

    fn release(&self, name: &CellName) -> Result<(), HostsError> {
        self.cell(name)?;
        self.remove_note(name, HELD)
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
