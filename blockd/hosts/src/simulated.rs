//! An array in memory that several hosts of one test reach, with its coordinator: leases, keys, and
//! an administrator who can take the coordinator away. Cells are files, so that pools can be on
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::cell::{Cell, CellName, Holder, HostNumber, Owner};
use crate::coordinator::{Coordinator, Device, Space};
use crate::error::HostsError;
use crate::fence::{Fence, Key};

const NAME: &str = "the simulated group";
/// For how long a lease is kept for its host.
const LEASE_LEFT: Duration = Duration::from_secs(10);

/// The array with its directory. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Array(Arc<Mutex<State>>, Arc<Mutex<Steps>>);

/// The steps that matter for a takeover, by name: "fence 1", "free one", "take one", "release one".
#[derive(Default)]
struct Steps {
    done: Vec<String>,
    /// Run once, before the step of that name.
    before: Vec<(String, Intervention)>,
}

/// An event before a step, which it may fail.
type Intervention = Box<dyn FnOnce() -> bool + Send>;

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.done.fmt(f)
    }
}

#[derive(Debug)]
struct State {
    folder: PathBuf,
    total: u64,
    cells: BTreeMap<CellName, Entry>,
    /// Registered with the devices.
    keys: BTreeSet<Key>,
    /// In the directory.
    published: BTreeMap<HostNumber, Key>,
    addresses: BTreeMap<HostNumber, String>,
    nodes: BTreeMap<HostNumber, u32>,
    is_away: bool,
    /// Hosts whose membership the coordinator has ended: their leases may be taken.
    lapsed: BTreeSet<HostNumber>,
    /// How often each host was booted.
    boots: BTreeMap<HostNumber, u64>,
    /// Beside the first one.
    disks: Vec<Device>,
    refuses_keys: bool,
}

#[derive(Debug)]
struct Entry {
    size: u64,
    holder: Option<Owner>,
    is_new: bool,
}

/// One host's view of the array.
#[derive(Clone, Debug)]
pub struct Member {
    array: Array,
    host: HostNumber,
}

impl Array {
    /// An array of this size with its files in a folder.
    #[must_use]
    pub fn new(folder: PathBuf, total: u64) -> Self {
        let state = State {
            folder,
            total,
            cells: BTreeMap::new(),
            keys: BTreeSet::new(),
            published: BTreeMap::new(),
            addresses: BTreeMap::new(),
            nodes: BTreeMap::new(),
            is_away: false,
            lapsed: BTreeSet::new(),
            boots: BTreeMap::new(),
            disks: Vec::new(),
            refuses_keys: false,
        };
        Self(Arc::new(Mutex::new(state)), Arc::default())
    }

    /// Runs this before the next step of that name, which fails if it returns false. "keys", a look
    /// at the keys, "mark one" and "remove one" are steps as well, and are not listed.
    pub fn before(&self, step: &str, intervene: impl FnOnce() -> bool + Send + 'static) {
        self.1.lock().before.push((step.to_owned(), Box::new(intervene)));
    }

    /// The steps that were done, in their order.
    #[must_use]
    pub fn steps(&self) -> Vec<String> {
        self.1.lock().done.clone()
    }

    fn step(&self, name: String) -> Result<(), HostsError> {
        self.intervene(&name)?;
        self.1.lock().done.push(name);
        Ok(())
    }

    fn intervene(&self, name: &str) -> Result<(), HostsError> {
        let mut steps = self.1.lock();
        let found = steps.before.iter().position(|(step, _)| step == name);
        if let Some(at) = found {
            let (_, intervene) = steps.before.remove(at);
            // It may use the array.
            drop(steps);
            if !intervene() {
                let source = std::io::Error::other("was made to fail");
                return Err(HostsError::Io { what: name.to_owned(), source });
            }
        }
        Ok(())
    }

    /// The view of one host, which is coordinator and fence.
    #[must_use]
    pub fn member(&self, host: HostNumber) -> Member {
        Member { array: self.clone(), host }
    }

    /// The coordinator stops or starts to answer. Devices work all the while.
    pub fn set_away(&self, is_away: bool) {
        self.0.lock().is_away = is_away;
    }

    /// The group gets another disk, which takes no keys.
    pub fn add_unsuitable_disk(&self) {
        let mut state = self.0.lock();
        state.disks.push(Device { id: "second".to_owned(), path: PathBuf::from("/dev/second") });
        state.refuses_keys = true;
    }

    /// A host was switched off and on: its leases are of a former membership, and its devices gone.
    pub fn boot(&self, host: HostNumber) {
        *self.0.lock().boots.entry(host).or_default() += 1;
    }

    /// A host did not renew its membership.
    pub fn lapse(&self, host: HostNumber) {
        self.0.lock().lapsed.insert(host);
    }
}

impl State {
    fn cell(&self, name: &CellName, entry: &Entry, seen_by: HostNumber) -> Cell {
        let holder = match entry.holder {
            Some(owner) if owner == self.owner(seen_by) => Holder::This,
            Some(owner) => Holder::Other(owner),
            None => Holder::Free,
        };
        let path = self.folder.join(format!("cell-{name}"));
        Cell { name: name.clone(), size: entry.size, path, holder, is_new: entry.is_new }
    }

    fn owner(&self, host: HostNumber) -> Owner {
        Owner { host, generation: self.boots.get(&host).copied().unwrap_or_default() }
    }

    fn free(&self) -> u64 {
        let used: u64 = self.cells.values().map(|one| one.size).sum();
        self.total.saturating_sub(used)
    }
}

impl Member {
    /// The host whose view this is.
    #[must_use]
    pub const fn host(&self) -> HostNumber {
        self.host
    }

    /// The devices of the array.
    #[must_use]
    pub fn devices(&self) -> Vec<Device> {
        let first = Device { id: "array".to_owned(), path: PathBuf::from("/dev/array") };
        std::iter::once(first).chain(self.array.0.lock().disks.clone()).collect()
    }

    fn with<T>(
        &self,
        call: impl FnOnce(&mut State) -> Result<T, HostsError>,
    ) -> Result<T, HostsError> {
        let mut state = self.array.0.lock();
        if state.is_away {
            let (group, problem) = (NAME.to_owned(), "it was taken away".to_owned());
            return Err(HostsError::Away { group, problem });
        }
        // The directory lies on the devices, and a host without a key can't write them.
        let is_member =
            state.keys.is_empty() || state.keys.iter().any(|key| key.host() == self.host);
        if !is_member {
            let (group, problem) = (NAME.to_owned(), "this host is not registered".to_owned());
            return Err(HostsError::Away { group, problem });
        }
        call(&mut state)
    }

    /// The entry of a cell, which this host has.
    fn held<'a>(&self, state: &'a State, name: &CellName) -> Result<&'a Entry, HostsError> {
        let entry = state.cells.get(name).ok_or_else(|| not_found(name))?;
        match entry.holder == Some(state.owner(self.host)) {
            true => Ok(entry),
            false => Err(HostsError::NotHeld { cell: name.clone() }),
        }
    }
}

fn not_found(name: &CellName) -> HostsError {
    HostsError::NotFound { cell: name.clone(), group: NAME.to_owned() }
}

fn io(what: &str) -> impl FnOnce(std::io::Error) -> HostsError + use<> {
    let what = what.to_owned();
    move |source| HostsError::Io { what, source }
}

impl Coordinator for Member {
    fn cells(&self) -> Result<Vec<Cell>, HostsError> {
        self.array.intervene("cells")?;
        self.with(|state| {
            let cell = |(name, entry)| state.cell(name, entry, self.host);
            Ok(state.cells.iter().map(cell).collect())
        })
    }

    fn cell_at(&self, path: &Path) -> Option<CellName> {
        let name = path.strip_prefix(&self.array.0.lock().folder).ok()?.to_str()?.to_owned();
        CellName::parse(name.strip_prefix("cell-")?)
    }

    fn publish_key(&self, key: Key) -> Result<(), HostsError> {
        self.with(|state| {
            state.published.insert(key.host(), key);
            Ok(())
        })
    }

    fn keys(&self) -> Result<Vec<Key>, HostsError> {
        self.array.intervene("keys")?;
        // It is only read, which a host without a key may.
        let state = self.array.0.lock();
        Ok(state.published.values().copied().collect())
    }

    fn publish_address(&self, host: HostNumber, address: &str) -> Result<(), HostsError> {
        self.with(|state| {
            state.addresses.insert(host, address.to_owned());
            Ok(())
        })
    }

    fn address_of(&self, host: HostNumber) -> Result<Option<String>, HostsError> {
        let state = self.array.0.lock();
        Ok(state.addresses.get(&host).filter(|address| !address.is_empty()).cloned())
    }

    fn publish_node(&self, host: HostNumber, node: u32) -> Result<(), HostsError> {
        self.with(|state| {
            state.nodes.insert(host, node);
            Ok(())
        })
    }

    fn nodes(&self) -> Result<Vec<(HostNumber, u32)>, HostsError> {
        Ok(self.array.0.lock().nodes.iter().map(|(host, node)| (*host, *node)).collect())
    }

    fn forget_host(&self, host: HostNumber, key: Option<Key>) -> Result<(), HostsError> {
        self.with(|state| {
            if state.published.get(&host).copied() != key {
                return Err(HostsError::CameBack { host });
            }
            state.published.remove(&host);
            state.addresses.remove(&host);
            state.nodes.remove(&host);
            Ok(())
        })
    }

    fn space(&self) -> Result<Space, HostsError> {
        self.with(|state| Ok(Space { total: state.total, free: state.free() }))
    }

    fn create(&self, name: &CellName, bytes: u64) -> Result<Cell, HostsError> {
        self.with(|state| {
            if state.cells.contains_key(name) {
                let (cell, group) = (name.clone(), NAME.to_owned());
                return Err(HostsError::Exists { cell, group });
            }
            let free = state.free();
            if bytes > free {
                return Err(HostsError::NoSpace { group: NAME.to_owned(), needed: bytes, free });
            }
            let holder = Some(state.owner(self.host));
            let entry = Entry { size: bytes, holder, is_new: true };
            let cell = state.cell(name, &entry, self.host);
            let file = OpenOptions::new().write(true).create(true).truncate(true).open(&cell.path);
            file.and_then(|file| file.set_len(bytes)).map_err(io("make a cell"))?;
            state.cells.insert(name.clone(), entry);
            Ok(cell)
        })
    }

    fn finish(&self, name: &CellName) -> Result<(), HostsError> {
        self.with(|state| {
            self.held(state, name)?;
            state.cells.entry(name.clone()).and_modify(|entry| entry.is_new = false);
            Ok(())
        })
    }

    fn mark_new(&self, name: &CellName) -> Result<(), HostsError> {
        self.array.intervene(&format!("mark {name}"))?;
        self.with(|state| {
            self.held(state, name)?;
            state.cells.entry(name.clone()).and_modify(|entry| entry.is_new = true);
            Ok(())
        })
    }

    fn acquire(&self, name: &CellName) -> Result<Cell, HostsError> {
        self.array.step(format!("take {name}"))?;
        self.with(|state| {
            let own = state.owner(self.host);
            let holder = state.cells.get(name).ok_or_else(|| not_found(name))?.holder;
            // A lease of a former membership is free.
            let is_free =
                |by: &Owner| state.owner(by.host) != *by || state.lapsed.contains(&by.host);
            if let Some(by) = holder.filter(|by| *by != own && !is_free(by)) {
                return Err(HostsError::Held { cell: name.clone(), by: Some(by.host) });
            }
            state.cells.entry(name.clone()).and_modify(|entry| entry.holder = Some(own));
            Ok(state.cell(name, &state.cells[name], self.host))
        })
    }

    fn free(&self, name: &CellName, of: Owner) -> Result<(), HostsError> {
        self.array.step(format!("free {name}"))?;
        self.with(|state| {
            let entry = state.cells.get_mut(name).ok_or_else(|| not_found(name))?;
            entry.holder = entry.holder.filter(|holder| *holder != of);
            Ok(())
        })
    }

    fn confirm(&self, name: &CellName) -> Result<Duration, HostsError> {
        let state = self.array.0.lock();
        let holder = state.cells.get(name).and_then(|entry| entry.holder);
        let is_ours = holder == Some(state.owner(self.host)) && !state.lapsed.contains(&self.host);
        Ok(if is_ours { LEASE_LEFT } else { Duration::ZERO })
    }

    fn release(&self, name: &CellName) -> Result<(), HostsError> {
        self.array.step(format!("release {name}"))?;
        self.with(|state| {
            let own = state.owner(self.host);
            let entry = state.cells.get_mut(name).ok_or_else(|| not_found(name))?;
            entry.holder = entry.holder.filter(|holder| *holder != own);
            Ok(())
        })
    }

    fn extend(&self, name: &CellName, bytes: u64) -> Result<u64, HostsError> {
        self.with(|state| {
            let entry = self.held(state, name)?;
            let (present, free) = (entry.size, state.free());
            if present >= bytes {
                return Ok(present);
            }
            let needed = bytes - present;
            if needed > free {
                return Err(HostsError::NoSpace { group: NAME.to_owned(), needed, free });
            }
            let path = state.cell(name, entry, self.host).path;
            let file = OpenOptions::new().write(true).open(path);
            file.and_then(|file| file.set_len(bytes)).map_err(io("extend a cell"))?;
            state.cells.entry(name.clone()).and_modify(|entry| entry.size = bytes);
            Ok(bytes)
        })
    }

    fn remove(&self, name: &CellName) -> Result<(), HostsError> {
        self.array.intervene(&format!("remove {name}"))?;
        self.with(|state| {
            let entry = self.held(state, name)?;
            let path = state.cell(name, entry, self.host).path;
            fs::remove_file(path).map_err(io("remove a cell"))?;
            state.cells.remove(name);
            Ok(())
        })
    }

    fn is_in_use(&self) -> Result<bool, HostsError> {
        let state = self.array.0.lock();
        let own = Some(state.owner(self.host));
        Ok(state.cells.values().any(|cell| cell.holder == own))
    }

    fn cut_off(&self) -> Result<(), HostsError> {
        Ok(())
    }
}

impl Fence for Member {
    fn join(&self, key: Key, former: &[Key], _: bool) -> Result<(), HostsError> {
        let mut state = self.array.0.lock();
        let unsuitable = || {
            let problem = "refuses the registration of this host's key".to_owned();
            HostsError::Unsuitable { group: NAME.to_owned(), problem }
        };
        if state.refuses_keys {
            return Err(unsuitable());
        }
        let keys = &mut state.keys;
        // As NVMe does it: a host has one key, and only names it to replace it.
        let own = keys.iter().copied().find(|one| one.host() == self.host && *one != key);
        if own.is_some_and(|own| !former.contains(&own)) {
            return Err(unsuitable());
        }
        own.into_iter().for_each(|own| {
            keys.remove(&own);
        });
        keys.insert(key);
        Ok(())
    }

    fn is_member(&self, key: Key) -> Result<bool, HostsError> {
        // A disk knows whether the key is that of the host which asks.
        Ok(key.host() == self.host && self.array.0.lock().keys.contains(&key))
    }

    fn fence(&self, own: Key, other: Key) -> Result<bool, HostsError> {
        self.array.step(format!("fence {}", other.host()))?;
        let mut state = self.array.0.lock();
        if !state.keys.contains(&own) {
            return Err(HostsError::Fenced { group: NAME.to_owned() });
        }
        Ok(state.keys.remove(&other))
    }

    fn leave(&self, key: Key) -> Result<(), HostsError> {
        self.array.0.lock().keys.remove(&key);
        Ok(())
    }
}
