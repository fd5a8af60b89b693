//! The superblock that counts, and pages by their address.

use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::{Superblock, copy_offsets};
use blockd_mapper::format::{FormatError, Limits, PageRef, Place, Problem, Structure};
use blockd_mapper::geometry::{Geometry, PAGE_BYTES, PAGE_SIZE};
use blockd_mapper::io::{IoError, Page};
use blockd_mapper::open::PresentDevice;
use blockd_mapper::open::find::{Copies, Found};
use blockd_mapper::units::{DeviceIndex, PageAddress, PhysicalExtent};

use super::Fault;

/// Pages read at once: neighbours were mostly written by the same checkpoint.
const WINDOW_PAGES: u64 = 16;

/// Where a superblock has its generation, and its table of devices.
const GENERATION_AT: usize = 72;
const TABLE_AT: usize = 512;
const TABLE_END: usize = 1536;

/// The devices of a pool, as their reader has them.
pub trait Media {
    /// Reads whole sectors. `device` is the reader's own number of it.
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError>;
}

/// The state of one copy of the superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyState {
    /// Equal to the one that counts.
    Good,
    /// Sound, and of an older generation.
    Stale(u64),
    /// Sound, and written since the one that counts was read: the pool is being served.
    Newer(u64),
    /// Not to be used, as where power was lost while it was written.
    Torn(Fault),
    /// Not to be used, and no loss of power leaves it so: the media have changed it, or can't read
    /// it.
    Bad(Fault),
}

/// One copy of the superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuperCopy {
    /// The device by its place in the pool's table.
    pub device: usize,
    /// The byte where it lies.
    pub offset: u64,
    /// Its state.
    pub state: CopyState,
}

/// A pool's metadata, read as it lies on the media.
pub struct Reader<'m> {
    media: &'m mut dyn Media,
    superblock: Superblock,
    /// The reader's number of each device of the table.
    handles: Vec<u8>,
    geometry: Geometry,
    limits: Limits,
    window: Vec<u8>,
    /// Pages that the window holds, from where on.
    held: Option<(PageAddress, u64)>,
}

impl std::fmt::Debug for Reader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("superblock", &self.superblock).finish_non_exhaustive()
    }
}

impl<'m> Reader<'m> {
    /// Finds the superblock that counts, by the rules by which a pool is opened.
    pub fn open(media: &'m mut dyn Media, devices: &[PresentDevice]) -> Result<Self, MapperError> {
        let mut copies = Copies::default();
        for (handle, device) in (0..).zip(devices) {
            add_copies(media, &mut copies, DeviceIndex(handle), device.size);
        }
        let Found { superblock, handles } = copies.choose(devices)?;
        let count = superblock.devices.as_slice().len();
        Self::with(media, superblock, handles[..count].to_vec())
    }

    /// Reads by a superblock that the caller has chosen.
    pub(crate) fn with(
        media: &'m mut dyn Media,
        superblock: Superblock,
        handles: Vec<u8>,
    ) -> Result<Self, MapperError> {
        let geometry = Geometry::new(superblock.extent_size)?;
        let limits = superblock.limits()?;
        let window = vec![0; usize::try_from(WINDOW_PAGES * PAGE_BYTES).unwrap_or(PAGE_SIZE)];
        Ok(Self { media, superblock, handles, geometry, limits, window, held: None })
    }

    /// The superblock that counts.
    #[must_use]
    pub const fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Extent and sub-block size.
    #[must_use]
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the limits of the pool's entries and references.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Where an extent lies: the reader's number of the device, and the byte.
    #[must_use]
    pub fn place(&self, extent: PhysicalExtent) -> Option<(DeviceIndex, u64)> {
        let (index, record) = self.superblock.devices.find(extent)?;
        let handle = self.handles.get(usize::from(index.0))?;
        let offset = (extent.0 - record.first.0) * self.geometry.extent_size();
        Some((DeviceIndex(*handle), offset))
    }

    /// The reader's number of a device of the table.
    #[must_use]
    pub fn handle(&self, device: usize) -> DeviceIndex {
        DeviceIndex(self.handles.get(device).copied().unwrap_or(u8::MAX))
    }

    /// Every copy of the superblock there should be, and its state.
    pub fn copies(&mut self) -> Vec<SuperCopy> {
        let mut found = Vec::new();
        let table = self.superblock.devices;
        for (device, record) in table.present() {
            let offsets = copy_offsets(self.geometry, record.extents);
            let [a, last] = offsets.first_pair;
            let [b, after] = offsets.second_pair;
            for offset in [a, b, last, after] {
                let state = self.copy_state(device, offset);
                found.push(SuperCopy { device, offset, state });
            }
        }
        found
    }

    fn copy_state(&mut self, device: usize, offset: u64) -> CopyState {
        let handle = self.handle(device);
        let place = Place::Device { device: handle, offset };
        let mut page = Page::zeroed();
        if let Err(error) = self.media.read(handle, offset, &mut page.0) {
            let structure = Structure::Superblock;
            return CopyState::Bad(Fault::Io { structure, place, error });
        }
        match Superblock::decode(&page.0, place) {
            Err(error) if self.may_be_torn(device, offset, &page) => CopyState::Torn(error.into()),
            Err(error) => CopyState::Bad(error.into()),
            Ok(copy) if copy.generation < self.superblock.generation => {
                CopyState::Stale(copy.generation)
            }
            Ok(copy) if copy.generation > self.superblock.generation => {
                CopyState::Newer(copy.generation)
            }
            Ok(copy) => {
                let this = DeviceIndex(u8::try_from(device).unwrap_or(u8::MAX));
                if copy == (Superblock { this_device: this, ..self.superblock.clone() }) {
                    return CopyState::Good;
                }
                if self.superblock.labels_root.is_none() && !copy.labels_root.is_none() {
                    // A release that does not know labels was writing it anew.
                    return CopyState::Stale(copy.generation);
                }
                let found = u64::from(copy.this_device.0);
                let problem =
                    Problem::Mismatch { field: "this device", found, expected: device as u64 };
                CopyState::Bad(problem.of(Structure::Superblock, place).into())
            }
        }
    }

    /// Whether an unsound copy may be the rest of an interrupted write. Sectors of 512 bytes are
    /// written as a whole or not at all, and between two generations all but the first differ in
    /// the table of devices only.
    fn may_be_torn(&self, device: usize, offset: u64, page: &Page) -> bool {
        if !Superblock::has_magic(&page.0) {
            // A device that was added begins with anything, and one that has grown ends so.
            return device > 0 || offset >= 2 * PAGE_BYTES;
        }
        let generation = self.superblock.generation;
        let found = page.0[GENERATION_AT..].first_chunk().map_or(0, |v| u64::from_le_bytes(*v));
        if found != generation || !self.superblock.is_known_whole() {
            return found.abs_diff(generation) <= 1;
        }
        let this_device = DeviceIndex(u8::try_from(device).unwrap_or(u8::MAX));
        let mut expected = Page::zeroed();
        Superblock { this_device, ..self.superblock.clone() }.encode(&mut expected);
        let same =
            |range: std::ops::Range<usize>| page.0.get(range.clone()) == expected.0.get(range);
        same(0..TABLE_AT) && same(TABLE_END..PAGE_SIZE)
    }

    /// The bytes of a metadata page, not decoded yet.
    pub(crate) fn page(&mut self, reference: PageRef, structure: Structure) -> Result<Page, Fault> {
        let address = reference.address;
        let place = Place::Page(address);
        let (extent, within) = self.geometry.page_place(address);
        let Some((device, base)) = self.place(extent) else {
            let allowed = "a page of one of the pool's devices";
            return Err(outside(address, allowed, structure, place).into());
        };
        let mut page = Page::zeroed();
        if !self.holds(address) {
            let pages = (self.geometry.pages_per_extent() - within).min(WINDOW_PAGES);
            let len = usize::try_from(pages * PAGE_BYTES).unwrap_or(PAGE_SIZE);
            self.held = None;
            let offset = base + within * PAGE_BYTES;
            match self.media.read(device, offset, &mut self.window[..len]) {
                Ok(()) => self.held = Some((address, pages)),
                // One page of them may be unreadable.
                Err(_) => {
                    return match self.media.read(device, offset, &mut page.0) {
                        Ok(()) => Ok(page),
                        Err(error) => Err(Fault::Io { structure, place, error }),
                    };
                }
            }
        }
        if let Some((first, _)) = self.held {
            let at = usize::try_from((address.0 - first.0) * PAGE_BYTES).unwrap_or(0);
            page.0.copy_from_slice(&self.window[at..at + PAGE_SIZE]);
        }
        Ok(page)
    }

    fn holds(&self, address: PageAddress) -> bool {
        self.held.is_some_and(|(first, pages)| {
            address.0.checked_sub(first.0).is_some_and(|at| at < pages)
        })
    }

    /// Bytes of the pool's media, by extent.
    pub(crate) fn bytes(
        &mut self,
        extent: PhysicalExtent,
        within: u64,
        bytes: &mut [u8],
        structure: Structure,
    ) -> Result<(DeviceIndex, u64), Fault> {
        let Some((device, base)) = self.place(extent) else {
            let allowed = "an extent of one of the pool's devices";
            let address = self.geometry.page_address(extent, 0);
            return Err(outside(address, allowed, structure, Place::Memory).into());
        };
        let offset = base + within;
        let place = Place::Device { device, offset };
        match self.media.read(device, offset, bytes) {
            Ok(()) => Ok((device, offset)),
            Err(error) => Err(Fault::Io { structure, place, error }),
        }
    }
}

fn outside(
    address: PageAddress,
    allowed: &'static str,
    structure: Structure,
    place: Place,
) -> FormatError {
    Problem::field("page address", address.0, allowed).of(structure, place)
}

fn add_copies(media: &mut dyn Media, copies: &mut Copies, device: DeviceIndex, size: u64) {
    for offset in [0, PAGE_BYTES] {
        add_copy(media, copies, device, offset, size);
    }
    for back in copies.back_offsets(usize::from(device.0), size) {
        for offset in [back, back + PAGE_BYTES] {
            add_copy(media, copies, device, offset, size);
        }
    }
}

/// Why the superblock at a device's front is one that this build doesn't know, if it is.
pub(crate) fn too_new(
    media: &mut dyn Media,
    device: DeviceIndex,
    present: &PresentDevice,
) -> Option<FormatError> {
    let mut copies = Copies::default();
    for offset in [0, PAGE_BYTES] {
        add_copy(media, &mut copies, device, offset, present.size);
    }
    copies.too_new()
}

/// The newest superblock on a device by itself, whatever the others say. Its front is believed;
/// where that can't be read its end is, and nothing before that, which may be a client's data.
pub fn newest_copy(
    media: &mut dyn Media,
    device: DeviceIndex,
    present: &PresentDevice,
) -> Option<Superblock> {
    let mut copies = Copies::default();
    // Alone, it is the first of the list.
    for offset in [0, PAGE_BYTES] {
        add_copy(media, &mut copies, device, offset, present.size);
    }
    let handle = usize::from(device.0);
    if copies.newest_on(handle).is_none() {
        add_copies(media, &mut copies, device, present.size);
        copies.only_own(handle, present.size);
    }
    copies.newest_on(handle).cloned()
}

/// Reads a copy. One that can't be read is one that isn't there, where others are.
fn add_copy(
    media: &mut dyn Media,
    copies: &mut Copies,
    device: DeviceIndex,
    offset: u64,
    size: u64,
) {
    let mut page = Page::zeroed();
    let inside = offset.checked_add(PAGE_BYTES).is_some_and(|end| end <= size);
    if !inside {
        return;
    }
    match media.read(device, offset, &mut page.0) {
        Ok(()) => copies.add(&page.0, device, offset),
        Err(error) => copies.add_unreadable(device, error),
    }
}
