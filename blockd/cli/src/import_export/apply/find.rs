//! The volume that a backup is applied to, and whether the backup fits it.

use blockd_api::v1::{
    CreateVolumeRequest, FrontEnd, GetVolumeRequest, ListVolumesRequest, Volume, VolumeKind,
};
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::units;

use super::{Apply, Place};
use crate::answers;
use crate::transfer::increment::Identity;

/// The state of the volume before the import.
pub(super) enum Found {
    /// The volume has the file's content already, as this snapshot of it records.
    Done(Volume, String),
    Place(Place),
}

impl Apply<'_> {
    /// Whether a snapshot has such a name. A backup of version 1 knows no time, and left none.
    pub(super) fn is_marked(&self, name: &str, of: &Identity) -> bool {
        let begin = self.mark_without_time(of);
        let Some(rest) = name.rfind(&begin).and_then(|at| name.get(at + begin.len()..)) else {
            return false;
        };
        let time = rest.strip_prefix('-').and_then(|time| u64::from_str_radix(time, 16).ok());
        rest.is_empty() || time.is_some_and(|time| of.fits_time(time))
    }

    /// Finds the volume and what it holds, or makes it. Refuses one that the file is not for.
    pub(super) async fn find(&mut self) -> Result<Found, Error> {
        let request =
            GetVolumeRequest { name: self.asked.name.clone(), pool: self.asked.pool.clone() };
        let volume = match self.client.get_volume(request).await {
            Ok(answer) => answers::volume(answer.volume)?,
            Err(error) if error.kind() == ErrorKind::NotFound && self.header.base.is_none() => {
                let volume = self.create().await?;
                return Ok(Found::Place(Place { volume, created: true, known: None }));
            }
            Err(error) => return Err(error),
        };
        self.check_usable(&volume)?;
        let all = self.all(&volume).await?;
        let after = self.header.snapshot.clone();
        if let Some((marker, 0)) = self.copies(&volume, &after, &all).await? {
            return Ok(Found::Done(volume, marker));
        }
        let known = match self.check_base(&volume, &all).await {
            Ok(known) => known,
            Err(_) if self.asked.force => None,
            Err(error) => return Err(error),
        };
        Ok(Found::Place(Place { volume, created: false, known }))
    }

    /// All volumes and snapshots of a volume's pool.
    pub(super) async fn all(&mut self, volume: &Volume) -> Result<Vec<Volume>, Error> {
        let list = ListVolumesRequest { pool: volume.pool.clone(), brief: true };
        Ok(self.client.list_volumes(list).await?.volumes)
    }

    /// Checks that the volume's content can change, and that the stream's blocks are its own.
    pub(super) fn check_usable(&self, volume: &Volume) -> Result<(), Error> {
        if volume.kind() == VolumeKind::Snapshot {
            return Err(Error::in_use(self.what(), "is a snapshot, which never changes"));
        }
        if volume.front_end() == FrontEnd::Ublk {
            let problem = "is a block device now: detach it first";
            return Err(Error::in_use(self.what(), problem));
        }
        if volume.connections > 0 {
            return Err(Error::in_use(self.what(), "has clients that are connected"));
        }
        if volume.block_size > self.header.block_bytes {
            let allowed = format!("at least the {} of {}", volume.block_size, self.what());
            return Err(Error::invalid("the backup's block", self.header.block_bytes, allowed));
        }
        Ok(())
    }

    async fn create(&mut self) -> Result<Volume, Error> {
        let request = CreateVolumeRequest {
            name: self.asked.name.clone(),
            pool: self.asked.pool.clone(),
            size_bytes: units::to_wire(self.header.snapshot.size_bytes),
            limit_bytes: units::to_wire(self.header.snapshot.size_bytes),
            block_size: self.header.block_bytes,
            ..Default::default()
        };
        let created = self.client.create_volume(request).await;
        answers::volume(created.map_err(|error| self.of_size(error))?.volume)
    }

    /// The error of a volume that could not be made with exactly the size of the snapshot.
    pub(super) fn of_size(&self, error: Error) -> Error {
        let detail = error.detail();
        if detail.field == "limit_bytes" { self.other_size(detail.allowed) } else { error }
    }

    /// The error of a volume whose size is rounded up here: it would never be a copy.
    pub(super) fn rounded(&self, size_bytes: u64) -> Error {
        self.other_size(format!("like {size_bytes}, to which it is rounded up here"))
    }

    fn other_size(&self, allowed: String) -> Error {
        let Identity { name, size_bytes, .. } = &self.header.snapshot;
        Error::out_of_range(format!("the size of {}", shown(name)), size_bytes, allowed)
    }

    /// Checks that the volume has the content of the file's base. Returns the snapshot that records
    /// this.
    pub(super) async fn check_base(
        &mut self,
        volume: &Volume,
        all: &[Volume],
    ) -> Result<Option<String>, Error> {
        let Some(base) = self.header.base.clone() else {
            if volume.valid_bytes == 0 {
                return Ok(None);
            }
            let problem = "holds data, and the backup begins with an empty volume: choose another \
                           name";
            return Err(Error::in_use(self.what(), self.or_by_force(problem, ", or --force")));
        };
        let begins = format!("the backup begins with {}", shown(&base.name));
        match self.copies(volume, &base, all).await? {
            Some((known, 0)) => Ok(Some(known)),
            Some((known, changed)) => {
                let known = shown(&known);
                let problem = format!(
                    "was written since it held {known}, in {changed} bytes, and {begins}: \
                     `blockd rollback` it to that first",
                );
                Err(Error::in_use(self.what(), self.or_by_force(&problem, ", or --force")))
            }
            None => {
                let own = all
                    .iter()
                    .filter(|one| one.kind() == VolumeKind::Snapshot && is_own(one, volume));
                let newest = own.max_by_key(|one| one.id).map(|one| shown(&one.name));
                let newest = newest.unwrap_or_else(|| "none".to_owned());
                let pool = units::hex(&self.header.pool_id);
                let made = match base.made_unix_ms {
                    0 => String::new(),
                    made => format!(" made {}", answers::date(units::to_wire(made))),
                };
                let problem = format!(
                    "is no copy of what the backup begins with: its newest snapshot is {newest}, \
                     and {begins}, id {} of pool {pool}{made}",
                    base.id
                );
                let force = "; --force applies it nevertheless";
                Err(Error::in_use(self.what(), self.or_by_force(&problem, force)))
            }
        }
    }

    /// A problem, and that it can be ignored, if it can.
    fn or_by_force(&self, problem: &str, force: &str) -> String {
        format!("{problem}{}", if self.is_forcible { force } else { "" })
    }
}

/// Whether a snapshot is one of a volume's: of itself, or of what became its content.
fn is_own(snapshot: &Volume, volume: &Volume) -> bool {
    let name = snapshot.name.strip_prefix(&volume.name);
    snapshot.origin == volume.name || name.is_some_and(|rest| rest.starts_with('@'))
}
