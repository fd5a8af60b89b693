//! The steps of the world for tests. They assert what the node part must never do.

use std::path::{Path, PathBuf};

use super::{Fake, Fault, Held, State, Stored, looped, shown, used};
use crate::capability::Mode;
use crate::error::Error;
use crate::node::content::{Content, Making};
use crate::node::kata::IMAGE;
use crate::node::mountinfo::{Device, Entry, Table};
use crate::node::records::{Place, Record};
use crate::node::world::{
    Conditions, DeviceLook, Devices, Images, Kind, Loop, Mount, Mounted, Mounts, Node, Result,
    Unfinished, Usage, Volume, Volumes, Wanted,
};
use crate::sizes::Range;

impl Volumes for Fake {
    fn get(&self, place: &Place) -> Result<Option<Volume>> {
        self.whole(|state| {
            Ok(state.volumes.get(&place.name).map(|volume| shown(volume, &state.problem)))
        })
    }

    fn attach(&self, place: &Place, read_only: bool) -> Result<Volume> {
        self.whole(|state| {
            let minor = state.new_minor();
            let Some(volume) = state.volumes.get_mut(&place.name) else {
                return Err(Error::not_found("volume", &place.name));
            };
            if volume.own {
                volume.read_only = read_only;
            } else if volume.minor.is_none() {
                volume.minor = Some(minor);
                volume.read_only = read_only;
                volume.shown = volume.size;
            } else if volume.read_only != read_only {
                return Err(Error::in_use(&place.name, "is attached in another way"));
            }
            Ok(shown(volume, ""))
        })
    }

    fn detach(&self, place: &Place) -> Result<()> {
        self.whole(|state| {
            let minor = state.volumes.get(&place.name).and_then(|volume| volume.minor);
            if minor.is_some_and(|minor| state.in_use(minor)) {
                return Err(used(&place.name));
            }
            if let Some(volume) = state.volumes.get_mut(&place.name) {
                volume.minor = volume.minor.filter(|_| volume.own);
                volume.read_only &= !volume.own;
            }
            Ok(())
        })
    }

    fn enlarge(&self, place: &Place, range: &Range) -> Result<Option<Volume>> {
        self.whole(|state| {
            let enlarges = state.enlarges;
            let volume = state.volumes.get_mut(&place.name).filter(|_| enlarges);
            Ok(volume.map(|volume| {
                volume.size = volume.size.max(range.required.get());
                volume.shown = volume.size;
                shown(volume, "")
            }))
        })
    }

    fn mark(&self, place: &Place, unfinished: Unfinished) -> Result<()> {
        self.whole(|state| {
            let volume = state.volumes.get_mut(&place.name).expect("a volume to be marked");
            assert!(volume.unfinished.is_some() && !volume.standby, "marked: {volume:?}");
            volume.unfinished = Some(unfinished);
            Ok(())
        })
    }

    fn create(&self, place: &Place, wanted: &Wanted) -> Result<()> {
        let size = wanted.size_bytes;
        self.whole(|state| {
            if !state.volumes.contains_key(&place.name) {
                let own = wanted.pmem.is_direct;
                let minor = own.then(|| state.new_minor());
                let new = Stored { own, minor, ..Stored::new(size, Held::Nothing) };
                state.volumes.insert(place.name.clone(), new);
            }
            Ok(())
        })
    }

    fn delete(&self, place: &Place) -> Result<()> {
        self.whole(|state| {
            let used_by = |volume: &&Stored| match volume.minor {
                Some(minor) => !volume.own || state.in_use(minor),
                None => false,
            };
            if state.volumes.get(&place.name).filter(used_by).is_some() {
                return Err(used(&place.name));
            }
            state.volumes.remove(&place.name);
            Ok(())
        })
    }

    fn record(&self, volume: &str) -> Option<Record> {
        self.state().records.get(volume).cloned()
    }

    fn keep(&self, record: &Record) -> Result<()> {
        self.whole(|state| {
            state.records.insert(record.volume.clone(), record.clone());
            Ok(())
        })
    }

    fn forget(&self, volume: &str) -> Result<()> {
        self.whole(|state| {
            state.records.remove(volume);
            Ok(())
        })
    }

    fn vm_folder(&self, place: &Place) -> Result<PathBuf> {
        Ok(Path::new("/vm").join(&place.name))
    }

    fn mapping_name(&self, place: &Place) -> String {
        format!("map-{}", place.name)
    }

    fn count_conflict(&self, mode: Mode) {
        self.state().conflicts.push(mode);
    }
}

impl Mounts for Fake {
    fn mounts(&self) -> Result<Table> {
        self.whole(|state| Ok(Table { entries: state.mounts.clone() }))
    }

    fn mount(&self, mount: &Mount<'_>) -> Result<Mounted> {
        self.whole(|state| {
            assert_eq!(state.paths.get(mount.path), Some(&Kind::Folder), "{mount:?}");
            let twice = state.mounts.iter().any(|it| it.path == mount.path);
            assert!(!twice, "mounted over something: {mount:?}");
            let no_dax = state.no_dax;
            let volume = state.of(mount.device);
            if mount.options.has_dax() && !volume.own {
                return Err(used("DAX"));
            }
            let has_dax = mount.options.has_dax() && !no_dax;
            let Held::FileSystem { kind, dirty, .. } = &mut volume.held else {
                panic!("{:?} can't be mounted", volume.held);
            };
            assert_eq!(kind, mount.file_system);
            let writes = !mount.options.read_only();
            if volume.read_only && (writes || *dirty) {
                return Ok(Mounted::NeedsWriting);
            }
            *dirty = writes;
            let read_only = !writes || volume.read_only;
            state.mounts.push(Entry {
                major: mount.device.major,
                minor: mount.device.minor,
                root: "/".into(),
                path: mount.path.to_path_buf(),
                read_only,
                whole_read_only: read_only,
                stopped: false,
                dax: has_dax,
                kind: mount.file_system.to_owned(),
                source: mount.device.path.clone(),
            });
            Ok(Mounted::Done)
        })
    }

    fn bind(&self, from: &Path, to: &Path) -> Result<()> {
        self.whole(|state| {
            assert!(state.at(to).is_none(), "bound over something: {}", to.display());
            let node = from.starts_with("/dev");
            let wanted = if node { Kind::File } else { Kind::Folder };
            assert_eq!(state.paths.get(to), Some(&wanted), "{}", to.display());
            let entry = if node {
                Entry {
                    major: 0,
                    minor: 5,
                    root: Path::new("/").join(from.file_name().unwrap()),
                    path: to.to_path_buf(),
                    read_only: false,
                    whole_read_only: false,
                    stopped: false,
                    dax: false,
                    kind: "devtmpfs".to_owned(),
                    source: "devtmpfs".into(),
                }
            } else {
                let index = state.at(from).expect("something to bind");
                Entry { path: to.to_path_buf(), ..state.mounts[index].clone() }
            };
            state.mounts.push(entry);
            Ok(())
        })
    }

    fn make_read_only(&self, path: &Path) -> Result<()> {
        self.whole(|state| {
            let index = state.at(path).expect("something mounted");
            state.mounts[index].read_only = true;
            Ok(())
        })
    }

    fn unmount(&self, path: &Path, lazily: bool) -> Result<()> {
        self.whole(|state| {
            let Some(index) = state.at(path) else { return Ok(()) };
            if state.busy.contains(path) && !lazily {
                return Err(used(&path.display().to_string()));
            }
            let Entry { major, minor, .. } = state.mounts[index];
            // The numbers of a node's mount are those of the file system that holds nodes.
            let outer = state.volumes.values().find(|it| major != 0 && it.minor == Some(minor));
            let below = outer.and_then(|it| it.image.as_ref()).and_then(|image| image.minor);
            if below.is_some() {
                return Err(used("the image's file system"));
            }
            let entry = state.mounts.remove(index);
            let last = !state.in_use(entry.minor);
            let volume = state.volumes.values_mut().find_map(|it| it.with(entry.minor));
            if let Some(volume) = volume.filter(|_| last && entry.kind != "devtmpfs")
                && let Held::FileSystem { dirty, .. } = &mut volume.held
            {
                *dirty = false;
            }
            Ok(())
        })
    }

    fn kind(&self, path: &Path) -> Result<Option<Kind>> {
        self.whole(|state| {
            let bound = state.at(path).is_some_and(|at| state.mounts[at].kind == "devtmpfs");
            let image = path.ends_with(IMAGE).then(|| state.around(path)).flatten();
            if let Some(volume) = image {
                return Ok(volume.image.as_ref().map(|_| Kind::File));
            }
            let kind = if bound { Some(Kind::Other) } else { state.paths.get(path).copied() };
            Ok(kind)
        })
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        self.whole(|state| {
            state.paths.insert(path.to_path_buf(), Kind::Folder);
            Ok(())
        })
    }

    fn make_file(&self, path: &Path) -> Result<()> {
        self.whole(|state| {
            state.paths.insert(path.to_path_buf(), Kind::File);
            Ok(())
        })
    }

    fn remove(&self, path: &Path, _kind: Kind) -> Result<()> {
        self.whole(|state| {
            assert!(state.at(path).is_none(), "removed under a mount: {}", path.display());
            state.paths.remove(path);
            Ok(())
        })
    }
}

impl Devices for Fake {
    fn device_bytes(&self, device: &Device) -> Result<u64> {
        self.whole(|state| Ok(u64::try_from(state.of(device).shown).unwrap()))
    }

    fn is_free(&self, device: &Device) -> Result<bool> {
        self.whole(|state| {
            let orphan = state.orphan > 0;
            state.orphan = state.orphan.saturating_sub(1);
            Ok(!orphan && !state.in_use(device.minor))
        })
    }

    fn file_system_bytes(&self, device: &Device, file_system: &str) -> Result<Option<u64>> {
        self.whole(|state| match &state.of(device).held {
            Held::FileSystem { kind, bytes, .. } => {
                assert_eq!(kind, file_system);
                Ok(Some(u64::try_from(*bytes).unwrap()))
            }
            held => panic!("{held:?} has no size"),
        })
    }

    fn content(&self, device: &Device) -> Result<Content> {
        self.whole(|state| {
            Ok(match &state.of(device).held {
                // The output of a killed tool may look like any content.
                Held::Nothing | Held::Raw | Held::Partial => Content::Nothing,
                Held::Luks(_) => Content::Other("crypto_LUKS".to_owned()),
                Held::FileSystem { kind, .. } => Content::FileSystem(kind.clone()),
                Held::Other(what) => Content::Other((*what).to_owned()),
            })
        })
    }

    fn wipe(&self, device: &Device) -> Result<()> {
        let may = |state: &mut State| {
            assert!(!state.of(device).has_data(), "wiped: {:?}", state.of(device));
        };
        let whole = |state: &mut State| {
            may(state);
            state.of(device).put(Held::Nothing);
            Ok(())
        };
        self.step(whole, |state| {
            may(state);
            state.of(device).put(Held::Partial);
        })
    }

    fn format(&self, device: &Device, file_system: &str, _making: &Making) -> Result<()> {
        let minor = device.minor;
        let may = |state: &mut State| {
            assert!(!state.in_use(minor), "formatted while it is in use");
            assert_eq!(state.orphan, 0, "formatted beside a tool of a former process");
            assert!(!state.of(device).read_only, "formatted and can't be written");
            let volume = state.of(device);
            assert!(!volume.has_data(), "formatted over {:?}", volume.held);
            assert!(!matches!(volume.held, Held::Luks(_)), "formatted over a header");
        };
        let whole = |state: &mut State| {
            may(state);
            let volume = state.of(device);
            let (kind, bytes) = (file_system.to_owned(), volume.shown);
            volume.held = Held::FileSystem { kind, bytes, dirty: false, data: false };
            Ok(())
        };
        self.step(whole, |state| {
            may(state);
            state.of(device).held = Held::Partial;
            state.orphan = 1;
        })
    }

    fn check(&self, device: &Device, _file_system: &str) -> Result<()> {
        self.whole(|state| {
            assert!(!state.in_use(device.minor), "checked while it is in use");
            if let Held::FileSystem { dirty, .. } = &mut state.of(device).held {
                *dirty = false;
            }
            Ok(())
        })
    }

    fn grow(&self, device: &Device, _file_system: &str, path: &Path) -> Result<()> {
        self.whole(|state| {
            let index = state.at(path).expect("something mounted");
            assert!(!state.mounts[index].read_only, "grown through a mount that can't be written");
            let volume = state.of(device);
            let shown = volume.shown;
            if let Held::FileSystem { bytes, .. } = &mut volume.held {
                *bytes = shown;
            }
            Ok(())
        })
    }

    fn usage(&self, path: &Path) -> Result<(Usage, Usage)> {
        self.whole(|state| {
            assert!(state.at(path).is_some());
            Ok(state.fault.usage)
        })
    }
}

impl Images for Fake {
    fn is_blank(&self, device: &Device) -> Result<bool> {
        self.whole(|state| Ok(state.of(device).held == Held::Nothing))
    }

    fn has_dax(&self, path: &Path) -> Result<bool> {
        self.whole(|state| {
            let index = state.at(path).expect("something mounted");
            Ok(state.mounts[index].dax)
        })
    }

    fn make_image(&self, file: &Path, _partition: bool) -> Result<()> {
        self.whole(|state| {
            let volume = state.around(file).expect("something mounted around it");
            assert!(volume.image.is_none(), "made over an image");
            let held = Held::Nothing;
            volume.image =
                Some(Box::new(Stored { own: true, ..Stored::new(volume.size / 2, held) }));
            Ok(())
        })
    }

    fn loop_of(&self, file: &Path) -> Result<Option<Loop>> {
        self.whole(|state| {
            let volume = state.around(file);
            Ok(volume.and_then(|volume| volume.image.as_deref()).and_then(looped))
        })
    }

    fn attach_loop(&self, file: &Path, read_only: bool) -> Result<Loop> {
        self.whole(|state| {
            let minor = state.new_minor();
            let volume = state.around(file).expect("something mounted around it");
            let image = volume.image.as_mut().expect("an image");
            assert!(image.minor.is_none(), "two loop devices over one image");
            (image.minor, image.read_only) = (Some(minor), read_only);
            Ok(looped(image).expect("just made"))
        })
    }

    fn detach_loop(&self, device: &Device) -> Result<()> {
        self.whole(|state| {
            assert!(!state.in_use(device.minor), "taken away while it is in use");
            state.of(device).minor = None;
            Ok(())
        })
    }
}

impl Conditions for Fake {
    fn device_look(&self, device: &Device) -> Result<DeviceLook> {
        self.whole(|state| {
            let found = state.volumes.values_mut().find_map(|it| it.with(device.minor));
            let bytes = found.and_then(|volume| u64::try_from(volume.shown).ok());
            let Fault { node, bad_blocks, .. } = state.fault;
            Ok(DeviceLook { node, bytes: state.fault.bytes.unwrap_or(bytes), bad_blocks })
        })
    }

    fn node_at(&self, path: &Path, _device: &Device) -> Result<Node> {
        self.whole(|state| {
            assert!(state.at(path).is_some());
            Ok(state.fault.bound)
        })
    }

    fn file_system_errors(&self, _device: &Device, _file_system: &str) -> Result<u64> {
        self.whole(|state| Ok(state.fault.errors))
    }

    fn answers(&self, path: &Path) -> Result<bool> {
        self.whole(|state| {
            assert!(state.at(path).is_some());
            Ok(!state.fault.shut_down)
        })
    }
}
