//! A pool's extents as a picture: which of them hold metadata, which volume has the others, and
//! what is free.

pub(crate) mod svg;
pub(crate) mod text;

use super::output::terminal::Tone;

/// The use of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Superblocks, log, map pages, and what is kept back for them.
    Metadata,
    /// One volume, by its index in [`Picture::volumes`].
    Volume(usize),
    /// More than one volume or snapshot.
    Shared,
    /// Granted to a volume and not written yet.
    Reserved,
    /// Nothing.
    Free,
}

/// Neighbouring extents of one device with the same use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The index of the first on its device.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// The use of the extents.
    pub what: Use,
}

/// One of the pool's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// Where it is.
    pub path: String,
    /// In order, without gaps.
    pub runs: Vec<Run>,
}

/// All that is drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Picture {
    /// The pool's name.
    pub pool: String,
    /// The size of an extent, bytes.
    pub extent_bytes: u64,
    /// In the order of the pool.
    pub devices: Vec<Device>,
    /// Names, in the order of their letters.
    pub volumes: Vec<String>,
}

/// A line of the legend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The use that the entry explains.
    pub what: Use,
    /// In words.
    pub name: String,
    /// How many extents.
    pub count: u64,
}

impl Picture {
    /// Extents of one device.
    #[must_use]
    pub(crate) fn device_count(device: &Device) -> u64 {
        device.runs.iter().map(|run| run.count).sum()
    }

    /// Extents of all devices.
    #[must_use]
    pub(crate) fn total_count(&self) -> u64 {
        self.devices.iter().map(Self::device_count).sum()
    }

    /// Every use with its extents: metadata, the volumes, shared, reserved, free. Volumes without
    /// an extent are left out, the others are always there.
    #[must_use]
    pub(crate) fn legend(&self) -> Vec<Entry> {
        let named =
            |what, name: &str| Entry { what, name: name.to_owned(), count: self.count(what) };
        let mut entries = vec![named(Use::Metadata, "metadata")];
        for (index, name) in self.volumes.iter().enumerate() {
            let entry = named(Use::Volume(index), name);
            if entry.count > 0 {
                entries.push(entry);
            }
        }
        entries.push(named(Use::Shared, "shared"));
        entries.push(named(Use::Reserved, "reserved"));
        entries.push(named(Use::Free, "free"));
        entries
    }

    fn count(&self, what: Use) -> u64 {
        let runs = self.devices.iter().flat_map(|device| &device.runs);
        runs.filter(|run| run.what == what).map(|run| run.count).sum()
    }
}

/// One character or square of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    /// The use of most of its used extents; free when all are free.
    pub what: Use,
    /// None of its extents is free.
    pub full: bool,
}

/// A device as at most `limit` spots of `extents_each`; the last may stand for fewer.
#[must_use]
pub(crate) fn spots(device: &Device, limit: u64) -> (Vec<Spot>, u64) {
    let total = Picture::device_count(device);
    let each = total.div_ceil(limit.max(1)).max(1);
    let mut spots = Vec::new();
    let mut tally = Tally::default();
    for run in &device.runs {
        let mut left = run.count;
        while left > 0 {
            let part = left.min(each - tally.total);
            tally.add(run.what, part);
            left -= part;
            if tally.total == each {
                spots.push(std::mem::take(&mut tally).spot());
            }
        }
    }
    if tally.total > 0 {
        spots.push(tally.spot());
    }
    (spots, each)
}

/// The extents of one spot, by use.
#[derive(Debug, Default)]
struct Tally {
    total: u64,
    free: u64,
    used: Vec<(Use, u64)>,
}

impl Tally {
    fn add(&mut self, what: Use, count: u64) {
        self.total += count;
        if what == Use::Free {
            self.free += count;
        } else if let Some(known) = self.used.iter_mut().find(|(known, _)| *known == what) {
            known.1 += count;
        } else {
            self.used.push((what, count));
        }
    }

    fn spot(self) -> Spot {
        let mut most: Option<(Use, u64)> = None;
        for (what, count) in self.used {
            if most.is_none_or(|(_, best)| count > best) {
                most = Some((what, count));
            }
        }
        Spot { what: most.map_or(Use::Free, |(what, _)| what), full: self.free == 0 }
    }
}

/// The character for a use. Small where some of the extents it stands for are free.
#[must_use]
pub(crate) fn letter(spot: Spot) -> char {
    match spot.what {
        Use::Metadata => '#',
        Use::Volume(index) => {
            let letter = u8::try_from(index).ok().filter(|&index| index < 26);
            match (letter, spot.full) {
                (Some(index), true) => char::from(b'A' + index),
                (Some(index), false) => char::from(b'a' + index),
                // Beyond the alphabet volumes are no longer distinguished.
                (None, _) => '*',
            }
        }
        Use::Shared => '=',
        Use::Reserved => '-',
        Use::Free => '.',
    }
}

/// The colour of a use.
#[must_use]
pub(crate) fn tone(what: Use) -> Tone {
    match what {
        Use::Metadata | Use::Shared => Tone::Strong,
        Use::Volume(index) => Tone::Colour(u8::try_from(index % 6).unwrap_or(0)),
        Use::Reserved => Tone::Plain,
        Use::Free => Tone::Dim,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn picture() -> Picture {
        let run = |first, count, what| Run { first, count, what };
        let runs = vec![
            run(0, 8, Use::Metadata),
            run(8, 40, Use::Volume(0)),
            run(48, 20, Use::Volume(1)),
            run(68, 4, Use::Shared),
            run(72, 12, Use::Reserved),
            run(84, 172, Use::Free),
        ];
        Picture {
            pool: "default".to_owned(),
            extent_bytes: 256 << 10,
            devices: vec![Device { path: "/srv/default.pool".to_owned(), runs }],
            volumes: vec!["data".to_owned(), "logs".to_owned(), "unused".to_owned()],
        }
    }

    #[test]
    fn spots_cover_every_extent_once() {
        let picture = picture();
        let device = &picture.devices[0];
        assert_eq!(spots(device, 256).0.len(), 256);
        assert_eq!(spots(device, 1000).0.len(), 256);
        let (coarse, each) = spots(device, 100);
        assert_eq!((coarse.len(), each), (86, 3));
    }

    #[test]
    fn anything_used_shows_and_small_letters_mean_room() {
        let picture = picture();
        let (spots, each) = spots(&picture.devices[0], 4);
        let text: String = spots.into_iter().map(letter).collect();
        assert_eq!((text.as_str(), each), ("A-..", 64));
    }

    #[test]
    fn the_legend_counts_all_extents() {
        let picture = picture();
        let legend = picture.legend();
        assert_eq!(legend.iter().map(|entry| entry.count).sum::<u64>(), picture.total_count());
        assert!(legend.iter().all(|entry| entry.name != "unused"));
    }
}
