//! A world for tests: a daemon, a kernel, folders and tools, in memory. Any step can be the last of
//! a process, before it has an effect, in the middle of it, or after.

mod encryption;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use blockd_luks::Key;

use super::mountinfo::{Device, Entry};
use super::records::{Place, Record};
use super::world::{Kind, Loop, Node, Result, Unfinished, Usage, Volume, World};
use crate::capability::Mode;
use crate::error::Error;

pub(crate) use self::encryption::HEADER;

/// How a step goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// The process dies before, or in the middle where there is one.
    DiesBefore,
    DiesAfter,
    /// The step fails with no effect or half of it.
    FailsBefore,
    /// The step has its effect, and the caller receives no answer.
    FailsAfter,
}

pub(crate) const WRONGS: [Wrong; 4] =
    [Wrong::DiesBefore, Wrong::DiesAfter, Wrong::FailsBefore, Wrong::FailsAfter];

/// The content of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    Nothing,
    /// Left of a tool that was killed.
    Partial,
    FileSystem {
        kind: String,
        bytes: i64,
        /// Not unmounted in order.
        dirty: bool,
        /// Whether it holds user data.
        data: bool,
    },
    Other(&'static str),
    Raw,
    /// A header with the keys of its slots. The content of the mapping is the image.
    Luks(Vec<Key>),
}

#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) size: i64,
    pub(crate) held: Held,
    pub(crate) minor: Option<u32>,
    pub(crate) read_only: bool,
    /// The size that the kernel still shows.
    pub(crate) shown: i64,
    /// Its device is the kernel's own.
    pub(crate) own: bool,
    /// Its cell is on another node.
    pub(crate) standby: bool,
    /// The daemon has the label of encrypted volumes.
    pub(crate) labelled: bool,
    /// Its mark, if it moves between nodes.
    pub(crate) unfinished: Option<Unfinished>,
    /// The image in its file system, which is a device while it has a loop device; or the content
    /// of its mapping, which is one while it is open.
    pub(crate) image: Option<Box<Stored>>,
}

impl Stored {
    fn new(size: i64, held: Held) -> Self {
        let (minor, read_only, own, labelled, image) = (None, false, false, false, None);
        let (standby, unfinished, shown) = (false, None, size);
        Self { size, held, minor, read_only, shown, own, standby, labelled, unfinished, image }
    }

    /// The device of that number: it, or the loop device over its image.
    fn with(&mut self, minor: u32) -> Option<&mut Self> {
        if self.minor == Some(minor) {
            return Some(self);
        }
        self.image.as_mut().and_then(|image| image.with(minor))
    }
}

/// Faults of a device or its file system, independent of calls.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) node: Node,
    /// The kernel's size, in place of the volume's size.
    pub(crate) bytes: Option<Option<u64>>,
    pub(crate) bad_blocks: u64,
    pub(crate) errors: u64,
    pub(crate) shut_down: bool,
    /// The node of the file at a target path.
    pub(crate) bound: Node,
    pub(crate) usage: (Usage, Usage),
}

impl Default for Fault {
    fn default() -> Self {
        let usage = Usage { total: 100_000, used: 40_000, available: 60_000 };
        Self {
            node: Node::Right,
            bytes: None,
            bad_blocks: 0,
            errors: 0,
            shut_down: false,
            bound: Node::Right,
            usage: (usage, usage),
        }
    }
}

/// The disk of a node: its part of the state that survives a reboot.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeState {
    pub(crate) records: BTreeMap<String, Record>,
    pub(crate) paths: BTreeMap<PathBuf, Kind>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Faults of the devices and their contents.
    pub(crate) fault: Fault,
    /// The daemon says why it serves no device.
    pub(crate) problem: String,
    pub(crate) volumes: BTreeMap<String, Stored>,
    pub(crate) mounts: Vec<Entry>,
    pub(crate) paths: BTreeMap<PathBuf, Kind>,
    pub(crate) records: BTreeMap<String, Record>,
    /// Paths below which a file is open.
    pub(crate) busy: BTreeSet<PathBuf>,
    /// Devices that a process has open.
    pub(crate) holders: BTreeSet<u32>,
    /// How many checks a tool of a killed process survives.
    pub(crate) orphan: u32,
    pub(crate) conflicts: Vec<Mode>,
    /// File systems go on without DAX.
    pub(crate) no_dax: bool,
    /// The node makes volumes larger, and not the controller.
    pub(crate) enlarges: bool,
    pub(crate) steps: u64,
    pub(crate) wrong: Option<(u64, Wrong)>,
    /// Steps at which something else goes wrong after the first did.
    pub(crate) then: Option<(u64, Wrong)>,
    pub(crate) dead: bool,
    next_minor: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Fake(Mutex<State>);

impl Fake {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn as_world(&self) -> World<'_> {
        World { volumes: self, machine: self }
    }

    /// A volume that the controller made.
    pub(crate) fn add(&self, name: &str, size: i64, held: Held) -> Place {
        self.state().volumes.insert(name.to_owned(), Stored::new(size, held));
        Place { pool: "default".to_owned(), name: name.to_owned() }
    }

    /// A volume that moves between nodes.
    pub(crate) fn add_moving(&self, name: &str, size: i64, held: Held) -> Place {
        let place = self.add(name, size, held);
        let mut state = self.state();
        let volume = state.volumes.get_mut(name).expect("just added");
        volume.unfinished = Some(Unfinished::Nothing);
        place
    }

    /// Another node has the volumes from now on. Its records and paths are these, and those of the
    /// former node are returned.
    pub(crate) fn change_node(&self, node: NodeState) -> NodeState {
        self.reboot();
        let mut state = self.state();
        for volume in state.volumes.values_mut() {
            volume.minor = None;
        }
        let records = std::mem::replace(&mut state.records, node.records);
        let paths = std::mem::replace(&mut state.paths, node.paths);
        NodeState { records, paths }
    }

    /// A volume whose device is the kernel's own.
    pub(crate) fn add_own(&self, name: &str, size: i64, held: Held) -> Place {
        let place = self.add(name, size, held);
        let mut state = self.state();
        let minor = Some(state.new_minor());
        let volume = state.volumes.get_mut(name).expect("just added");
        (volume.own, volume.minor) = (true, minor);
        place
    }

    /// Another process takes the dead one's place. True when one was dead.
    pub(crate) fn revive(&self) -> bool {
        std::mem::take(&mut self.state().dead)
    }

    /// Reboots the machine: mounts, open files and devices are gone; the daemon adds the devices
    /// again, with other numbers.
    pub(crate) fn reboot(&self) {
        let mut state = self.state();
        state.dead = false;
        state.orphan = 0;
        state.mounts.clear();
        state.busy.clear();
        state.holders.clear();
        let attached: Vec<String> = state
            .volumes
            .iter()
            .filter(|(_, volume)| volume.minor.is_some())
            .map(|(name, _)| name.clone())
            .collect();
        for name in attached {
            let minor = state.new_minor();
            if let Some(volume) = state.volumes.get_mut(&name) {
                volume.minor = Some(minor);
                volume.shown = volume.size;
                if let Some(image) = &mut volume.image {
                    image.minor = None;
                }
            }
        }
    }

    /// A step: counted, and the last one if its number has come.
    fn step<T>(
        &self,
        effect: impl FnOnce(&mut State) -> Result<T>,
        half: impl FnOnce(&mut State),
    ) -> Result<T> {
        let mut state = self.state();
        let gone = || Error::unexpected("the process", "is dead");
        if state.dead {
            return Err(gone());
        }
        state.steps += 1;
        let Some((_, wrong)) = state.wrong.filter(|(at, _)| *at == state.steps) else {
            return effect(&mut state);
        };
        state.wrong = state.then.take().map(|(more, wrong)| (state.steps + more, wrong));
        match wrong {
            Wrong::DiesBefore | Wrong::FailsBefore => half(&mut state),
            Wrong::DiesAfter | Wrong::FailsAfter => drop(effect(&mut state)),
        }
        state.dead = matches!(wrong, Wrong::DiesBefore | Wrong::DiesAfter);
        Err(gone())
    }

    fn whole<T>(&self, effect: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        self.step(effect, |_| ())
    }
}

impl State {
    fn new_minor(&mut self) -> u32 {
        self.next_minor += 1;
        self.next_minor
    }

    fn of(&mut self, device: &Device) -> &mut Stored {
        let found = self.volumes.values_mut().find_map(|it| it.with(device.minor));
        found.expect("a device that is there")
    }

    fn at(&self, path: &Path) -> Option<usize> {
        self.mounts.iter().rposition(|entry| entry.path == path)
    }

    /// The volume whose file system is mounted at the folder of this file.
    fn around(&mut self, file: &Path) -> Option<&mut Stored> {
        let index = self.at(file.parent()?)?;
        let minor = self.mounts[index].minor;
        self.volumes.values_mut().find(|it| it.minor == Some(minor))
    }

    fn in_use(&self, minor: u32) -> bool {
        let is_below = |it: &Stored| {
            it.minor == Some(minor) && it.image.as_ref().is_some_and(|image| image.minor.is_some())
        };
        self.holders.contains(&minor)
            || self.volumes.values().any(is_below)
            || self.mounts.iter().any(|it| it.kind != "devtmpfs" && it.minor == minor)
    }
}

fn shown(volume: &Stored, problem: &str) -> Volume {
    let device = |minor| Device { path: format!("/dev/ublkb{minor}").into(), major: 259, minor };
    Volume {
        size_bytes: volume.size,
        empty: !volume.own && !volume.standby && volume.held == Held::Nothing,
        standby: volume.standby,
        attached: volume.minor.is_some() && !volume.own,
        device: volume.minor.map(device),
        read_only: volume.read_only,
        mapped_bytes: volume.size / 4,
        thick: false,
        problem: problem.to_owned(),
        own: volume.own,
        dax: volume.own,
        charged_bytes: 0,
        encrypted: volume.labelled,
        locked: None,
        unfinished: volume.unfinished.map(|mark| match volume.standby {
            true => Unfinished::Nothing,
            false => mark,
        }),
    }
}

fn looped(image: &Stored) -> Option<Loop> {
    let path = |minor| format!("/dev/loop{minor}").into();
    let device = |minor| Device { path: path(minor), major: 7, minor };
    image.minor.map(device).map(|device| Loop { device, read_only: image.read_only })
}

fn used(what: &str) -> Error {
    Error::in_use(what, "is in use")
}
