//! The allowed content of a snapshot that is taken under load.

use super::content::{self, Generation, SECTOR};
use super::volume::{Pending, Volume, Wrong};

/// The content that a snapshot may have: for each sector the last write that was answered before
/// the snapshot was asked for, or one that was under way until the snapshot was answered.
#[derive(Clone, Debug)]
pub struct Cut {
    id: u32,
    sub_block: u64,
    settled: Vec<Generation>,
    meanwhile: Vec<Pending>,
}

impl Cut {
    /// A snapshot is about to be asked for.
    #[must_use]
    pub fn begin(volume: &mut Volume) -> Self {
        volume.meanwhile = Some(volume.pending.values().copied().collect());
        let (id, sub_block, settled) = (volume.id, volume.sub_block, volume.settled.clone());
        Self { id, sub_block, settled, meanwhile: Vec::new() }
    }

    /// The snapshot was answered, or the server is gone.
    pub fn end(&mut self, volume: &mut Volume) {
        self.meanwhile = volume.meanwhile.take().unwrap_or_default();
    }

    /// Bytes of the snapshot.
    #[must_use]
    pub const fn size(&self) -> u64 {
        (self.settled.len() * SECTOR) as u64
    }

    /// Compares a piece of the snapshot.
    ///
    /// # Errors
    /// When a sector has none of the allowed contents.
    pub fn check(&self, first: u64, data: &[u8]) -> Result<(), Wrong> {
        for (sector, bytes) in (first..).zip(data.chunks_exact(SECTOR)) {
            let old = usize::try_from(sector).ok().and_then(|at| self.settled.get(at)).copied();
            let new = self.meanwhile.iter().filter_map(|op| op.leaves(sector, self.sub_block));
            let mut allowed = old.into_iter().chain(new);
            if !allowed.any(|one| content::holds(bytes, self.id, sector, one)) {
                let (id, found) = (self.id, content::describe(bytes));
                return Err(Wrong(format!(
                    "a snapshot of volume {id}, sector {sector}: {found}; right is {old:?}, or a \
                     write that was under way"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockd_testkit::nbd::Kind;

    #[test]
    fn a_snapshot_has_what_was_answered_before_it_and_nothing_begun_after_it() {
        let mut volume = Volume::new("v", 1, 64 << 10, 4096);
        let mut rng = fastrand::Rng::with_seed(1);
        let mut write = |volume: &mut Volume| volume.begin(Kind::Write, &mut rng).unwrap();
        let apply = |image: &mut [u8], (request, data): &(_, Vec<u8>)| {
            let request: &blockd_testkit::nbd::Request = request;
            let at = usize::try_from(request.offset).unwrap();
            image[at..at + data.len()].copy_from_slice(data);
        };
        let before = write(&mut volume);
        volume.answered(before.0.cookie, &[]).unwrap();
        let mut cut = Cut::begin(&mut volume);
        let meanwhile = write(&mut volume);
        cut.end(&mut volume);
        volume.answered(meanwhile.0.cookie, &[]).unwrap();
        let after = write(&mut volume);
        let mut image = vec![0; 64 << 10];
        assert!(cut.check(0, &image).is_err(), "an answered write is missing");
        apply(&mut image, &before);
        cut.check(0, &image).unwrap();
        apply(&mut image, &meanwhile);
        cut.check(0, &image).unwrap();
        apply(&mut image, &after);
        assert!(cut.check(0, &image).is_err(), "a later write is there");
    }
}
