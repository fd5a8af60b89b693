//! A region as the fake kernel knows it.

use std::collections::BTreeMap;

use super::{FakeSpec, Shown};
use crate::platform::overhead::usable_of;
use crate::platform::{Mode, PageMap};

/// The mode of a namespace, as it is stored on the media.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Info {
    pub(super) mode: Mode,
    pub(super) map: PageMap,
    pub(super) align: u64,
    pub(super) uuid: String,
    /// The uuid of the namespace; empty without labels.
    pub(super) parent: String,
    /// The size of the namespace when it was made.
    pub(super) size: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct FakeNamespace {
    pub(super) number: u64,
    pub(super) uuid: String,
    pub(super) alt_name: String,
    pub(super) start: u64,
    /// 0 of a seed.
    pub(super) size: u64,
    pub(super) bound: bool,
    /// Whatever it was made into, it is enabled as it is.
    pub(super) force_raw: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FakeClaim {
    pub(super) mode: Mode,
    pub(super) number: u64,
    pub(super) uuid: String,
    pub(super) map: Option<PageMap>,
    pub(super) align: u64,
    pub(super) sector_size: u64,
    pub(super) namespace: Option<u64>,
    pub(super) bound: bool,
}

pub(super) const KINDS: [(Mode, &str); 3] =
    [(Mode::Fsdax, "pfn"), (Mode::Devdax, "dax"), (Mode::Sector, "btt")];

impl FakeClaim {
    pub(super) fn word(&self) -> &'static str {
        KINDS.iter().find(|(mode, _)| *mode == self.mode).map_or("", |(_, word)| word)
    }

    fn seed(mode: Mode, number: u64) -> Self {
        let (uuid, map, namespace) = (String::new(), None, None);
        Self { mode, number, uuid, map, align: 2 << 20, sector_size: 0, namespace, bound: false }
    }
}

#[derive(Clone, Debug)]
pub(super) struct FakeRegion {
    pub(super) spec: FakeSpec,
    pub(super) number: usize,
    pub(super) namespaces: Vec<FakeNamespace>,
    pub(super) claims: Vec<FakeClaim>,
    pub(super) infos: BTreeMap<u64, Info>,
    pub(super) bad_blocks: Vec<(u64, u64)>,
    pub(super) shown: Shown,
    /// The largest namespace whose pages there is memory for.
    pub(super) most: Option<u64>,
}

impl FakeRegion {
    pub(super) fn new(number: usize, spec: FakeSpec) -> Self {
        let (namespaces, claims) = (Vec::new(), Vec::new());
        let (infos, bad_blocks) = (BTreeMap::new(), Vec::new());
        let mut region = Self {
            spec,
            number,
            namespaces,
            claims,
            infos,
            bad_blocks,
            shown: Shown::Whole,
            most: None,
        };
        if !region.spec.labelled {
            let size = region.spec.size;
            region.namespaces.push(FakeNamespace { size, ..FakeNamespace::default() });
        }
        region.reboot(number);
        region
    }

    /// Reboots: labels and media keep their content, under other numbers.
    pub(super) fn reboot(&mut self, number: usize) {
        self.number = number;
        self.claims.clear();
        self.namespaces.retain(|one| one.size > 0);
        self.namespaces.sort_by_key(|one| std::cmp::Reverse(one.start));
        for (at, namespace) in (0..).zip(&mut self.namespaces) {
            (namespace.number, namespace.bound) = (at, false);
            namespace.force_raw = false;
        }
        let numbers: Vec<u64> = self.namespaces.iter().map(|one| one.number).collect();
        for number in numbers {
            // A namespace that cannot be enabled has no device.
            let _ = self.probe(number);
        }
        self.add_seeds();
    }

    /// Seeds of each kind, where the last one was used.
    pub(super) fn add_seeds(&mut self) {
        if self.spec.labelled && self.namespaces.iter().all(|one| one.size > 0) {
            let number = self.namespaces.iter().map(|one| one.number + 1).max().unwrap_or(0);
            self.namespaces.push(FakeNamespace { number, ..FakeNamespace::default() });
        }
        for (mode, _) in KINDS {
            let of = |one: &&FakeClaim| one.mode == mode;
            if self.claims.iter().filter(of).all(|one| one.bound) {
                let number = self.claims.iter().filter(of).map(|one| one.number + 1).max();
                self.claims.push(FakeClaim::seed(mode, number.unwrap_or(0)));
            }
        }
    }

    pub(super) fn namespace_seed(&self) -> Option<u64> {
        self.namespaces.last().filter(|_| self.spec.labelled).map(|one| one.number)
    }

    pub(super) fn claim_seed(&self, mode: Mode) -> Option<u64> {
        self.claims.iter().rev().find(|one| one.mode == mode).map(|one| one.number)
    }

    pub(super) fn named(&mut self, number: u64) -> Option<&mut FakeNamespace> {
        self.namespaces.iter_mut().find(|one| one.number == number)
    }

    pub(super) fn claimer(&self, namespace: u64) -> Option<&FakeClaim> {
        self.claims.iter().find(|one| one.namespace == Some(namespace))
    }

    /// Pieces that no namespace has, in order: first byte and length.
    pub(super) fn gaps(&self) -> Vec<(u64, u64)> {
        let mut taken: Vec<(u64, u64)> = self
            .namespaces
            .iter()
            .filter(|one| one.size > 0)
            .map(|one| (one.start, one.size))
            .collect();
        taken.sort_unstable();
        taken.push((self.spec.size, 0));
        let (mut at, mut gaps) = (0, Vec::new());
        for (start, size) in taken {
            if start > at {
                gaps.push((at, start - at));
            }
            at = start + size;
        }
        gaps
    }

    pub(super) fn available(&self) -> u64 {
        self.gaps().iter().map(|(_, length)| length).sum()
    }

    pub(super) fn largest(&self) -> u64 {
        self.gaps().iter().map(|(_, length)| *length).max().unwrap_or(0)
    }

    /// The kernel detects the mode of a namespace, and enables it.
    pub(super) fn probe(&mut self, number: u64) -> Result<(), i32> {
        let Some(namespace) = self.named(number).map(|one| one.clone()) else {
            return Err(libc::ENODEV);
        };
        let info = self
            .infos
            .get(&namespace.start)
            .filter(|info| info.parent == namespace.uuid && !namespace.force_raw);
        let Some(info) = info.cloned() else {
            self.named(number).ok_or(libc::ENODEV)?.bound = true;
            return Ok(());
        };
        if info.mode != Mode::Sector && info.map == PageMap::Device && info.size != namespace.size {
            return Err(libc::ENOMEM);
        }
        let has_no_room = self.most.is_some_and(|most| namespace.size > most);
        if info.mode != Mode::Sector && info.map == PageMap::Memory && has_no_room {
            return Err(libc::ENOMEM);
        }
        let of = |one: &&FakeClaim| one.mode == info.mode;
        // The seed stays one: the detected device is made beside it.
        let next = self.claims.iter().filter(of).map(|one| one.number + 1).max().unwrap_or(0);
        let claim = FakeClaim {
            uuid: info.uuid,
            map: Some(info.map),
            align: info.align,
            sector_size: 4096,
            namespace: Some(number),
            bound: true,
            ..FakeClaim::seed(info.mode, next)
        };
        self.claims.insert(0, claim);
        // The namespace itself has no driver.
        Err(libc::ENODEV)
    }

    /// Its device: the name, the mode and its bytes.
    pub(super) fn device_of(&self, namespace: &FakeNamespace) -> Option<(String, Mode, u64)> {
        let (region, number) = (self.number, namespace.number);
        let dotted = if number == 0 { String::new() } else { format!(".{number}") };
        match self.claimer(namespace.number) {
            None if namespace.bound => {
                Some((format!("pmem{region}{dotted}"), Mode::Raw, namespace.size))
            }
            Some(claim) if claim.bound => {
                let name = match claim.mode {
                    Mode::Devdax => format!("dax{region}.{number}"),
                    Mode::Sector => format!("pmem{region}{dotted}s"),
                    _ => format!("pmem{region}{dotted}"),
                };
                let map = claim.map.unwrap_or(PageMap::Memory);
                let usable = usable_of(claim.mode, map, claim.align, namespace.size);
                Some((name, claim.mode, usable))
            }
            _ => None,
        }
    }
}
