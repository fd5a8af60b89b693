//! Encryption in the world for tests. A key is compared, and nothing is encrypted.

use std::path::Path;

use blockd_luks::{HEADER_BYTES, Key, Mapping};

use super::{Fake, Held, State, Stored};
use crate::node::mountinfo::Device;
use crate::node::world::{Encryption, Result};

/// Bytes of a header.
pub(crate) const HEADER: i64 = HEADER_BYTES.cast_signed();

/// The number of mappings' devices.
const MAPPER_MAJOR: u32 = 252;

impl Stored {
    /// Whether something would be lost with its content.
    pub(super) fn has_data(&self) -> bool {
        match &self.held {
            Held::Nothing | Held::Partial => false,
            Held::FileSystem { data, .. } => *data,
            Held::Luks(_) => self.image.as_ref().is_some_and(|image| image.has_data()),
            Held::Other(_) | Held::Raw => true,
        }
    }

    /// Replaces the content.
    pub(super) fn put(&mut self, held: Held) {
        (self.held, self.image) = (held, None);
    }

    fn keys(&mut self) -> &mut Vec<Key> {
        match &mut self.held {
            Held::Luks(keys) => keys,
            other => panic!("{other:?} has no keys"),
        }
    }
}

impl State {
    fn mapped(&mut self, name: &str) -> Option<&mut Stored> {
        let volume = self.volumes.get_mut(name.strip_prefix("map-")?)?;
        let is_luks = matches!(volume.held, Held::Luks(_));
        let open = volume.image.as_ref().is_some_and(|image| image.minor.is_some());
        (is_luks && open).then_some(volume)
    }
}

impl Encryption for Fake {
    fn mapping(&self, name: &str) -> Result<Option<Mapping>> {
        self.whole(|state| {
            let Some(volume) = state.mapped(name) else { return Ok(None) };
            let over = volume.minor.map(|minor| (259, minor)).into_iter().collect();
            let Some(image) = &volume.image else { return Ok(None) };
            let minor = image.minor.unwrap_or_default();
            Ok(Some(Mapping {
                path: format!("/dev/dm-{minor}").into(),
                major: MAPPER_MAJOR,
                minor,
                read_only: image.read_only,
                size_bytes: u64::try_from(image.shown).unwrap(),
                is_luks2: true,
                over,
            }))
        })
    }

    fn encrypt(&self, device: &Device, key: &Key) -> Result<()> {
        let may = |state: &mut State| {
            assert!(!state.in_use(device.minor), "encrypted while it is in use");
            assert_eq!(state.orphan, 0, "encrypted beside a tool of a former process");
            let volume = state.of(device);
            assert!(!volume.read_only, "encrypted and can't be written");
            assert!(!volume.has_data(), "encrypted over {volume:?}");
        };
        let whole = |state: &mut State| {
            may(state);
            let volume = state.of(device);
            volume.put(Held::Luks(vec![key.clone()]));
            // Decrypted, the zeroes of a new device are no zeroes.
            let size = volume.shown - HEADER;
            volume.image = Some(Box::new(Stored::new(size, Held::Partial)));
            Ok(())
        };
        self.step(whole, |state| {
            may(state);
            state.of(device).put(Held::Partial);
            state.orphan = 1;
        })
    }

    fn open(&self, device: &Device, _name: &str, key: &Key, read_only: bool) -> Result<bool> {
        self.whole(|state| {
            let minor = state.new_minor();
            let volume = state.of(device);
            if !volume.keys().contains(key) {
                return Ok(false);
            }
            let shown = volume.shown - HEADER;
            let image = volume.image.as_mut().expect("a content");
            assert!(image.minor.is_none(), "two mappings over one device");
            (image.minor, image.read_only) = (Some(minor), read_only);
            (image.size, image.shown) = (shown, shown);
            Ok(true)
        })
    }

    fn close(&self, name: &str) -> Result<bool> {
        self.whole(|state| {
            let minor = state.mapped(name).and_then(|volume| volume.image.as_ref()?.minor);
            if minor.is_some_and(|minor| state.in_use(minor)) {
                return Ok(false);
            }
            if let Some(image) = state.mapped(name).and_then(|volume| volume.image.as_mut()) {
                image.minor = None;
            }
            Ok(true)
        })
    }

    fn resize(&self, name: &str, _node: &Path, key: &Key) -> Result<bool> {
        self.whole(|state| {
            let volume = state.mapped(name).expect("an open mapping");
            if !volume.keys().contains(key) {
                return Ok(false);
            }
            let shown = volume.shown - HEADER;
            let image = volume.image.as_mut().expect("a content");
            (image.size, image.shown) = (shown, shown);
            Ok(true)
        })
    }

    fn is_key(&self, device: &Device, key: &Key) -> Result<bool> {
        self.whole(|state| Ok(state.of(device).keys().contains(key)))
    }

    fn add_key(&self, device: &Device, existing: &Key, new: &Key) -> Result<bool> {
        self.whole(|state| {
            let keys = state.of(device).keys();
            let is_open = keys.contains(existing);
            if is_open {
                keys.push(new.clone());
            }
            Ok(is_open)
        })
    }

    fn remove_key(&self, device: &Device, key: &Key) -> Result<bool> {
        self.whole(|state| {
            let keys = state.of(device).keys();
            let was_there = keys.contains(key);
            if let Some(at) = keys.iter().position(|there| there == key) {
                keys.remove(at);
            }
            assert!(!keys.is_empty(), "the last slot was removed");
            Ok(was_there)
        })
    }
}
