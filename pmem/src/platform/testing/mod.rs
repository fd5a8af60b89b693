//! A host for tests: a tree of files as sysfs has it, and a kernel that reacts to writes.
//!
//! Over a reboot the kernel keeps labels and media, and forgets the rest. It can be made to stop at
//! the n-th write, as when the writer dies there.

mod kernel;
mod region;
mod render;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Kernel, Places, Platform};
use crate::media::Domain;
use region::FakeRegion;

/// How a region shows itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    /// With all that is in it.
    Whole,
    /// Its driver is not bound.
    NotEnabled,
    /// Presented as if its modules had no labels.
    WithoutLabels,
}

/// A region of a fake host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FakeSpec {
    /// 0 where there is none that means something.
    pub cookie: u64,
    /// Modules.
    pub ways: u64,
    /// Bytes.
    pub size: u64,
    /// The alignment that it reports.
    pub align: Option<u64>,
    /// Its node of processors.
    pub node: Option<u32>,
    /// Namespaces are kept in labels.
    pub labelled: bool,
    /// The persistence domain that it reports.
    pub domain: Domain,
    /// Whether it is ordinary memory.
    pub volatile: bool,
}

impl FakeSpec {
    /// A labelled region of one module.
    #[must_use]
    pub fn new(cookie: u64, size: u64) -> Self {
        Self {
            cookie,
            ways: 1,
            size,
            align: Some(16 << 20),
            node: None,
            labelled: true,
            domain: Domain::MemoryController,
            volatile: false,
        }
    }

    /// The same with this many modules, aligned as by the kernel.
    #[must_use]
    pub fn of_ways(self, ways: u64) -> Self {
        let align = 16 << 20;
        let align = if align % ways == 0 { align } else { align * ways };
        Self { ways, align: Some(align), ..self }
    }

    /// The same near to a node of processors.
    #[must_use]
    pub fn at_node(self, node: u32) -> Self {
        Self { node: Some(node), ..self }
    }

    /// The same without labels.
    #[must_use]
    pub fn without_labels(self) -> Self {
        Self { labelled: false, ..self }
    }
}

#[derive(Debug)]
struct State {
    regions: Vec<FakeRegion>,
    /// Writes so far.
    writes: usize,
    /// Writes that are still carried out; none after that.
    writes_left: Option<usize>,
    /// A file, and where a copy of it goes when nothing is carried out any more.
    keeps: Option<(PathBuf, PathBuf)>,
    /// Ends of paths, the answer to a write there, and whether it is carried out all the same.
    refusals: Vec<(String, i32, bool)>,
    /// Names of devices, and where they are mounted.
    mounts: BTreeMap<String, String>,
    /// The same of nodes that are shown elsewhere.
    shown_at: Vec<(String, String)>,
    /// Names of devices that a process has open.
    open: Vec<String>,
    /// Devices that were taken away while they were in use.
    torn: Vec<String>,
}

/// A host whose files are in a folder of its own, which goes with it.
#[derive(Debug)]
pub struct FakeHost {
    root: PathBuf,
    state: Mutex<State>,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl FakeHost {
    /// A host with these regions.
    #[must_use]
    pub fn new(specs: &[FakeSpec]) -> Arc<Self> {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("blockd-fake-host-{}-{count}", std::process::id());
        // In memory, where there is such a place: files of devices are synced.
        let memory = PathBuf::from("/dev/shm");
        let base = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let root = base.join(folder);
        let _ = fs::remove_dir_all(&root);
        Self::at(root, specs)
    }

    /// The same in a folder that is not there yet.
    #[must_use]
    pub fn at(root: PathBuf, specs: &[FakeSpec]) -> Arc<Self> {
        let region = |(at, spec): (usize, &FakeSpec)| FakeRegion::new(at, spec.clone());
        let state = State {
            regions: specs.iter().enumerate().map(region).collect(),
            writes: 0,
            writes_left: None,
            keeps: None,
            refusals: Vec::new(),
            mounts: BTreeMap::new(),
            shown_at: Vec::new(),
            open: Vec::new(),
            torn: Vec::new(),
        };
        let host = Self { root, state: Mutex::new(state) };
        host.show();
        Arc::new(host)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The folder that stands for its root.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where it shows its devices.
    #[must_use]
    pub fn places(&self) -> Places {
        Places::under(&self.root)
    }

    /// Its persistent memory.
    #[must_use]
    pub fn platform(self: &Arc<Self>) -> Platform {
        Platform::new(self.places(), Arc::clone(self) as Arc<dyn Kernel>)
    }

    /// Writes to the kernel so far.
    #[must_use]
    pub fn writes(&self) -> usize {
        self.state().writes
    }

    /// Carries out `writes` more writes, and then none.
    pub fn stop_after(&self, writes: usize) {
        self.state().writes_left = Some(writes);
    }

    /// Copies a file when the writer is stopped, since the writer would not write it any more
    /// either.
    pub fn keep_when_stopped(&self, from: &Path, to: &Path) {
        self.state().keeps = Some((from.to_owned(), to.to_owned()));
    }

    /// Writes are carried out again: the writer was restarted.
    pub fn restart(&self) {
        self.state().writes_left = None;
    }

    /// Writes to paths that end so are answered with an error from now on.
    pub fn refuse(&self, end: &str, errno: i32) {
        self.state().refusals.push((end.to_owned(), errno, false));
    }

    /// The same for the next such write alone, which has its effect.
    pub fn refuse_after(&self, end: &str, errno: i32) {
        self.state().refusals.push((end.to_owned(), errno, true));
    }

    /// Shows the device's node at another path as well, as for a raw volume; `None` removes it.
    pub fn show_at(&self, device: &str, point: Option<&str>) {
        let mut state = self.state();
        state.shown_at.retain(|(name, _)| name != device);
        state.shown_at.extend(point.map(|point| (device.to_owned(), point.to_owned())));
        drop(state);
        self.show();
    }

    /// Clears all refusals.
    pub fn accept(&self) {
        self.state().refusals.clear();
    }

    /// The host reboots: state that is neither in labels nor on the media is gone, and everything
    /// is numbered the other way round.
    pub fn reboot(&self) {
        let mut state = self.state();
        state.writes_left = None;
        state.mounts.clear();
        state.shown_at.clear();
        state.open.clear();
        state.regions.reverse();
        for (at, region) in state.regions.iter_mut().enumerate() {
            region.reboot(at);
        }
        drop(state);
        self.show();
    }

    /// A region is not there any more.
    pub fn remove_region(&self, cookie: u64) {
        self.state().regions.retain(|region| region.spec.cookie != cookie);
        self.show();
    }

    /// Changes how a region is presented. Its content stays.
    pub fn show_region_as(&self, cookie: u64, shown: Shown) {
        for region in self.state().regions.iter_mut().filter(|one| one.spec.cookie == cookie) {
            region.shown = shown;
        }
        self.show();
    }

    /// The device is mounted there; by nothing, it isn't any more.
    pub fn mount(&self, device: &str, point: Option<&str>) {
        let mut state = self.state();
        match point {
            Some(point) => drop(state.mounts.insert(device.to_owned(), point.to_owned())),
            None => drop(state.mounts.remove(device)),
        }
        drop(state);
        self.show();
    }

    /// A process has the device open, or not any more.
    pub fn set_open(&self, device: &str, is_open: bool) {
        let mut state = self.state();
        state.open.retain(|name| name != device);
        if is_open {
            state.open.push(device.to_owned());
        }
        drop(state);
        self.show();
    }

    /// Marks `count` sectors of a region as bad.
    pub fn set_bad_blocks(&self, cookie: u64, first_sector: u64, count: u64) {
        for region in self.state().regions.iter_mut().filter(|one| one.spec.cookie == cookie) {
            region.bad_blocks.push((first_sector, count));
        }
        self.show();
    }

    /// In ordinary memory there is room for the pages of so large a namespace, and no larger one.
    pub fn set_most(&self, bytes: Option<u64>) {
        for region in &mut self.state().regions {
            region.most = bytes;
        }
    }

    /// Devices that were removed while they were in use.
    #[must_use]
    pub fn torn(&self) -> Vec<String> {
        self.state().torn.clone()
    }

    /// The file of the device of that name.
    #[must_use]
    pub fn device(&self, name: &str) -> PathBuf {
        self.places().dev.join(name)
    }

    fn show(&self) {
        let shown = render::render(&self.root, &self.state());
        assert!(shown.is_ok(), "a fake host can't be shown in {}: {shown:?}", self.root.display());
    }
}

impl Drop for FakeHost {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

impl Kernel for FakeHost {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let mut state = self.state();
        state.writes += 1;
        if state.writes_left == Some(0) {
            if let Some((from, to)) = state.keeps.take() {
                fs::copy(from, to)?;
            }
            return Err(io::Error::other("the writer is dead"));
        }
        state.writes_left = state.writes_left.map(|left| left - 1);
        let place = state.refusals.iter().position(|(end, ..)| path.ends_with(end));
        let refused = place.map(|place| (state.refusals[place].1, state.refusals[place].2));
        if let (Some(place), Some((_, true))) = (place, refused) {
            state.refusals.remove(place);
        }
        if let Some((errno, false)) = refused {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let inner = path.strip_prefix(&self.root).unwrap_or(path);
        let result = kernel::write(&mut state, inner, text.trim_end_matches('\n'));
        drop(state);
        self.show();
        if let Some((errno, _)) = refused {
            return Err(io::Error::from_raw_os_error(errno));
        }
        result.map_err(io::Error::from_raw_os_error)
    }

    fn open_exclusive(&self, path: &Path) -> io::Result<File> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let state = self.state();
        if state.mounts.contains_key(&name) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        if state.writes_left == Some(0) {
            return Err(io::Error::other("the writer is dead"));
        }
        File::options().read(true).write(true).open(path)
    }
}
