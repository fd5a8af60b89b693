//! The model of a volume: the content of each sector, and the requests in flight.

use std::collections::HashMap;
use std::fmt;

use blockd_testkit::nbd::{Kind, NO_HOLE, Request};

use super::content::{self, Generation, SECTOR};

/// Sectors of a block that is never torn by the death of the server.
const WHOLE: u64 = 8;

/// A promise that was broken.
#[derive(Clone, Debug)]
pub struct Wrong(pub String);

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

/// A request that was sent.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    pub kind: Kind,
    first: u64,
    count: u64,
    generation: Generation,
}

impl Pending {
    fn overlaps(&self, first: u64, count: u64) -> bool {
        self.first < first + count && first < self.first + self.count
    }

    /// The generation that it leaves in a sector; none where it changes nothing.
    pub(super) fn leaves(&self, sector: u64, sub_block: u64) -> Option<Generation> {
        if !(self.first..self.first + self.count).contains(&sector) {
            return None;
        }
        match self.kind {
            Kind::Write => Some(self.generation),
            Kind::WriteZeroes => Some(0),
            // Only whole sub-blocks are given back; ragged edges keep their content.
            Kind::Trim => {
                let start = sector / sub_block * sub_block;
                let whole = self.first <= start && start + sub_block <= self.first + self.count;
                whole.then_some(0)
            }
            Kind::Read | Kind::Flush => None,
        }
    }

    /// Bytes of data that a reply carries.
    #[must_use]
    pub fn answer_len(&self) -> usize {
        if self.kind == Kind::Read { usize::try_from(self.count).unwrap_or(0) * SECTOR } else { 0 }
    }
}

/// The fate of requests that were not answered when the server died.
#[derive(Clone, Copy, Default, Debug)]
pub struct Unanswered {
    /// Requests that change something.
    pub requests: u64,
    /// Sectors that hold what they wrote.
    pub new: u64,
    /// Sectors that hold what was there before.
    pub old: u64,
    /// Sectors that hold some of each, where that is allowed.
    pub torn: u64,
}

/// The model of a volume.
#[derive(Debug)]
pub struct Volume {
    pub name: String,
    /// Unique among all volumes that there ever were.
    pub(super) id: u32,
    /// Sectors of a sub-block: the unit of giving back.
    pub(super) sub_block: u64,
    pub(super) settled: Vec<Generation>,
    pub(super) pending: HashMap<u64, Pending>,
    /// While a snapshot is being taken, the requests that were under way at any time of that.
    pub(super) meanwhile: Option<Vec<Pending>>,
    /// Sectors that a cut-off copy tore. Nothing where such a thing must not be.
    torn: Option<Vec<u64>>,
    /// Some changes are to be durable by themselves.
    fua: bool,
    last_generation: Generation,
    last_cookie: u64,
}

impl Volume {
    /// One that was never written.
    #[must_use]
    pub fn new(name: &str, id: u32, bytes: u64, sub_block: u64) -> Self {
        let sectors = usize::try_from(bytes).unwrap_or(0) / SECTOR;
        Self {
            name: name.to_owned(),
            id,
            sub_block: sub_block / SECTOR as u64,
            settled: vec![0; sectors],
            pending: HashMap::new(),
            meanwhile: None,
            torn: None,
            fua: true,
            last_generation: 0,
            last_cookie: 0,
        }
    }

    /// The same, where the server copies to the media itself: killed meanwhile, it leaves a part
    /// of a sector.
    #[must_use]
    pub fn that_tears(self) -> Self {
        Self { torn: Some(Vec::new()), ..self }
    }

    /// From now on no change is to be durable by itself.
    pub fn leave_fua_out(&mut self) {
        self.fua = false;
    }

    /// One that holds these writes, found in its sectors, and none newer than this one.
    #[must_use]
    pub fn found(self, contents: Vec<Generation>, last: Generation) -> Self {
        Self { settled: contents, last_generation: last, ..self }
    }

    /// The number of a request's write; 0 where it is none.
    #[must_use]
    pub fn generation_of(&self, cookie: u64) -> Generation {
        let written = self.pending.get(&cookie).filter(|op| op.kind == Kind::Write);
        written.map_or(0, |op| op.generation)
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        (self.settled.len() * SECTOR) as u64
    }

    /// Requests under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// A request of this kind at a drawn place that nothing under way changes, with its data.
    /// Nothing when no such place was found.
    pub fn begin(&mut self, kind: Kind, rng: &mut fastrand::Rng) -> Option<(Request, Vec<u8>)> {
        let (first, count) = if kind == Kind::Flush { (0, 0) } else { self.free_place(kind, rng)? };
        self.last_cookie += 1;
        let mut data = Vec::new();
        let mut flags = 0;
        if kind == Kind::Write {
            self.last_generation += 1;
            data = vec![0; usize::try_from(count).ok()? * SECTOR];
            for (sector, bytes) in (first..).zip(data.chunks_exact_mut(SECTOR)) {
                content::fill(bytes, self.id, sector, self.last_generation);
            }
        }
        if kind == Kind::WriteZeroes && rng.bool() {
            flags |= NO_HOLE;
        }
        let changes = matches!(kind, Kind::Write | Kind::WriteZeroes | Kind::Trim);
        if changes && rng.u8(..20) == 0 && self.fua {
            flags |= blockd_testkit::nbd::FUA;
        }
        let generation = self.last_generation;
        let request = Pending { kind, first, count, generation };
        self.pending.insert(self.last_cookie, request);
        if let Some(meanwhile) = &mut self.meanwhile {
            meanwhile.push(request);
        }
        let offset = first * SECTOR as u64;
        let len = u32::try_from(count * SECTOR as u64).ok()?;
        Some((Request { kind, flags, cookie: self.last_cookie, offset, len }, data))
    }

    fn free_place(&self, kind: Kind, rng: &mut fastrand::Rng) -> Option<(u64, u64)> {
        let all = self.settled.len() as u64;
        for _ in 0..8 {
            // Mostly single blocks; some that are ragged, some that cross extents.
            let (count, align) = match rng.u8(..100) {
                0..70 => (WHOLE, WHOLE),
                70..80 => (rng.u64(1..WHOLE * 2), 1),
                80..95 => (rng.u64(1..=16) * WHOLE, WHOLE),
                _ => (rng.u64(1..=256) * WHOLE, WHOLE),
            };
            // A part of the volume is written over and over.
            let within = if rng.bool() { all } else { all / 16 };
            let count = count.min(within);
            let first = rng.u64(..=within - count) / align * align;
            let changes = kind != Kind::Read;
            let free = |other: &Pending| {
                !other.overlaps(first, count) || (!changes && other.kind == Kind::Read)
            };
            if self.pending.values().all(free) {
                return Some((first, count));
            }
        }
        None
    }

    /// The request that an answer belongs to.
    #[must_use]
    pub fn pending(&self, cookie: u64) -> Option<Pending> {
        self.pending.get(&cookie).copied()
    }

    /// An answer without an error came, with this data.
    ///
    /// # Errors
    /// When a read brought something else than was written last.
    pub fn answered(&mut self, cookie: u64, data: &[u8]) -> Result<(), Wrong> {
        let Some(op) = self.pending.remove(&cookie) else {
            return Err(Wrong(format!("{}: an answer to nothing: {cookie}", self.name)));
        };
        for (sector, bytes) in (op.first..).zip(data.chunks_exact(SECTOR)) {
            self.check(sector, bytes, self.generation(sector))?;
        }
        for sector in op.first..op.first + op.count {
            if let Some(generation) = op.leaves(sector, self.sub_block) {
                self.settle(sector, generation);
            }
        }
        Ok(())
    }

    fn generation(&self, sector: u64) -> Generation {
        usize::try_from(sector).ok().and_then(|at| self.settled.get(at)).copied().unwrap_or(0)
    }

    fn settle(&mut self, sector: u64, generation: Generation) {
        if let Some(place) = usize::try_from(sector).ok().and_then(|at| self.settled.get_mut(at)) {
            *place = generation;
        }
    }

    fn check(&self, sector: u64, bytes: &[u8], wanted: Generation) -> Result<(), Wrong> {
        if content::holds(bytes, self.id, sector, wanted) {
            return Ok(());
        }
        let found = content::describe(bytes);
        let (name, id) = (&self.name, self.id);
        let wanted = if wanted == 0 { "zeroes".to_owned() } else { format!("write {wanted}") };
        Err(Wrong(format!("{name} (volume {id}), sector {sector}: {found}; right is {wanted}")))
    }

    /// Compares a piece of the server's data after its death. Answered writes have to be there; of
    /// the others, each block holds the old or the new content, and keeps that from now on.
    ///
    /// # Errors
    /// When anything else is there.
    pub fn recovered(
        &mut self,
        first: u64,
        data: &[u8],
        unanswered: &mut Unanswered,
    ) -> Result<(), Wrong> {
        let sub_block = self.sub_block;
        let last = first + (data.len() / SECTOR) as u64;
        let touched: Vec<Pending> =
            self.pending.values().filter(|op| op.overlaps(first, last - first)).copied().collect();
        for (sector, bytes) in (first..).zip(data.chunks_exact(SECTOR)) {
            let old = self.generation(sector);
            let new = touched.iter().find_map(|op| op.leaves(sector, sub_block));
            match new {
                Some(new) if new != old && content::holds(bytes, self.id, sector, new) => {
                    unanswered.new += 1;
                }
                Some(new) if new != old => match self.check(sector, bytes, old) {
                    Ok(()) => unanswered.old += 1,
                    Err(wrong) => {
                        self.tear(sector, bytes, new).map_err(|()| wrong)?;
                        unanswered.torn += 1;
                    }
                },
                _ => self.check(sector, bytes, old)?,
            }
        }
        if self.torn.is_none() {
            for op in &touched {
                self.whole_blocks(op, first, data)?;
            }
        }
        for (sector, bytes) in (first..).zip(data.chunks_exact(SECTOR)) {
            let new = touched.iter().find_map(|op| op.leaves(sector, sub_block));
            if let Some(new) = new
                && content::holds(bytes, self.id, sector, new)
            {
                self.settle(sector, new);
            }
        }
        Ok(())
    }

    fn tear(&mut self, sector: u64, bytes: &[u8], new: Generation) -> Result<(), ()> {
        let mixed = content::mixes(bytes, self.id, sector, self.generation(sector), new);
        match &mut self.torn {
            Some(torn) if mixed => {
                torn.push(sector);
                Ok(())
            }
            _ => Err(()),
        }
    }

    /// Takes the sectors that were torn. A real client would send such a write again; here zeroes
    /// are written instead, and taken for settled.
    pub fn take_torn(&mut self) -> Vec<u64> {
        let torn = self.torn.as_mut().map(std::mem::take).unwrap_or_default();
        for &sector in &torn {
            self.settle(sector, 0);
        }
        torn
    }

    /// A block that a request covers as a whole is wholly old or wholly new.
    fn whole_blocks(&self, op: &Pending, first: u64, data: &[u8]) -> Result<(), Wrong> {
        let last = first + (data.len() / SECTOR) as u64;
        let start = op.first.max(first).next_multiple_of(WHOLE);
        let end = (op.first + op.count).min(last) / WHOLE * WHOLE;
        for block in (start..end).step_by(usize::try_from(WHOLE).unwrap_or(1)) {
            let (mut old, mut new) = (0, 0);
            for sector in block..block + WHOLE {
                let Some(leaves) = op.leaves(sector, self.sub_block) else { continue };
                let at = usize::try_from(sector - first).unwrap_or(0) * SECTOR;
                if leaves == self.generation(sector) {
                    continue;
                }
                if content::holds(&data[at..at + SECTOR], self.id, sector, leaves) {
                    new += 1;
                } else {
                    old += 1;
                }
            }
            if old > 0 && new > 0 {
                let name = &self.name;
                return Err(Wrong(format!(
                    "{name}, sector {block}: a block torn by {:?}: {new} sectors new, {old} old",
                    op.kind
                )));
            }
        }
        Ok(())
    }

    /// Everything was compared: nothing is under way any more. Returns how many requests that
    /// change something were not answered.
    pub fn forget_pending(&mut self) -> u64 {
        let changing = self
            .pending
            .values()
            .filter(|op| matches!(op.kind, Kind::Write | Kind::WriteZeroes | Kind::Trim));
        let count = changing.count() as u64;
        self.pending.clear();
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1 << 20;

    fn written() -> (Volume, Request, Vec<u8>) {
        let mut volume = Volume::new("v", 1, BYTES, 4096);
        let mut rng = fastrand::Rng::with_seed(1);
        loop {
            let (request, data) = volume.begin(Kind::Write, &mut rng).unwrap();
            if request.offset % 4096 == 0 && request.len == 4096 {
                return (volume, request, data);
            }
            volume.pending.clear();
        }
    }

    fn image(request: &Request, data: &[u8]) -> Vec<u8> {
        let mut image = vec![0; usize::try_from(BYTES).unwrap()];
        let at = usize::try_from(request.offset).unwrap();
        image[at..at + data.len()].copy_from_slice(data);
        image
    }

    #[test]
    fn an_answered_write_has_to_be_there() {
        let (mut volume, request, data) = written();
        volume.answered(request.cookie, &[]).unwrap();
        let mut unanswered = Unanswered::default();
        volume.recovered(0, &image(&request, &data), &mut unanswered).unwrap();
        let lost = volume.recovered(0, &vec![0; 1 << 20], &mut unanswered).unwrap_err();
        assert!(lost.0.contains("zeroes; right is write"), "{lost}");
    }

    #[test]
    fn an_unanswered_write_may_be_there_or_not_and_keeps_to_that() {
        let (mut volume, request, data) = written();
        let image = image(&request, &data);
        let mut unanswered = Unanswered::default();
        volume.recovered(0, &vec![0; 1 << 20], &mut unanswered).unwrap();
        volume.recovered(0, &image, &mut unanswered).unwrap();
        assert_eq!((unanswered.old, unanswered.new), (8, 8));
        assert_eq!(volume.forget_pending(), 1);
        volume.recovered(0, &vec![0; 1 << 20], &mut unanswered).unwrap_err();
    }

    #[test]
    fn a_torn_block_is_noticed() {
        let (mut volume, request, data) = written();
        let mut image = image(&request, &data);
        let at = usize::try_from(request.offset).unwrap();
        image[at..at + SECTOR].fill(0);
        let torn = volume.recovered(0, &image, &mut Unanswered::default()).unwrap_err();
        assert!(torn.0.contains("torn"), "{torn}");
    }

    #[test]
    fn a_read_of_something_else_is_noticed() {
        let (mut volume, request, _) = written();
        volume.answered(request.cookie, &[]).unwrap();
        let mut rng = fastrand::Rng::with_seed(2);
        let (read, _) = volume.begin(Kind::Read, &mut rng).unwrap();
        let mut data = vec![0; usize::try_from(read.len).unwrap()];
        data[0] = 1;
        volume.answered(read.cookie, &data).unwrap_err();
    }
}
