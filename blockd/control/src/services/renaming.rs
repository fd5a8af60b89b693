//! Volumes and snapshots that get another name.

use std::sync::Arc;

use blockd_api::v1;
use blockd_engine::pool::{Control as Command, PoolHandle, VolumeId};
use blockd_media::error::{Error, shown};
use blockd_media::names::check_new_name;

use super::volumes::{checked_name, find, of};
use super::{Control, EventKind, blocking};

impl Control {
    /// Gives a volume another name. A call that was carried out before changes nothing.
    pub(super) async fn rename_volume(
        &self,
        asked: &v1::RenameVolumeRequest,
    ) -> Result<v1::RenameVolumeResponse, Error> {
        let v1::RenameVolumeRequest { name: former, pool, new_name: name } = asked;
        checked_name(former)?;
        check_new_name(name).map_err(|allowed| Error::invalid("new_name", name, allowed))?;
        let handle = self.pool(pool)?;
        let _guards = self.lock_all(&handle, [former, name]).await;
        let changed = match (find(&handle, former), find(&handle, name)) {
            (None, None) => return Err(Error::not_found("volume", former)),
            (None, Some(_)) => false,
            (Some(_), Some(_)) if former == name => false,
            (Some(_), Some(_)) => {
                let problem = "exists: choose another name, or rename or delete that one first";
                return Err(Error::in_use(format!("volume {}", shown(name)), problem));
            }
            (Some(volume), None) => {
                self.rename_locked(&handle, volume.id, former, name).await?;
                true
            }
        };
        let volume = Some(self.describe(&handle, name).await?);
        Ok(v1::RenameVolumeResponse { changed, volume })
    }

    /// First the volume, then everything that is kept by its name. The daemon may die in between:
    /// its next start finds the attachment's volume by the id.
    async fn rename_locked(
        &self,
        pool: &PoolHandle,
        id: VolumeId,
        former: &str,
        name: &str,
    ) -> Result<(), Error> {
        let named = |name: &str| Command::Rename { volume: id, name: name.to_owned() };
        pool.control(named(name)).await.map_err(|error| of(pool, error))?;
        let place = (pool.name().to_owned(), former.to_owned());
        if let Err(error) = self.0.attachments.rename(place, id, name.to_owned()).await {
            let Err(problem) = pool.control(named(former)).await else { return Err(error) };
            let (name, problem) = (shown(name), of(pool, problem));
            return Err(error.with_note(&format!("volume {name} keeps its new name: {problem}")));
        }
        self.data_path().each_volume(&mut |stats| {
            if stats.pool.is(pool.name()) && stats.volume.is(former) {
                stats.volume.set(name);
            }
        });
        self.0.health.rename(pool.name(), former, name);
        self.rename_extends(pool.name(), former, name);
        if let Some(devices) = self.ublk().map(Arc::clone) {
            let (pool, former, name) = (pool.clone(), former.to_owned(), name.to_owned());
            blocking(move || {
                devices.rename(&pool.id(), id, (pool.name(), &former), (pool.name(), &name));
                Ok(())
            })
            .await?;
        }
        let text = format!("volume {} was renamed to {}", shown(former), shown(name));
        self.events().publish(EventKind::VolumeRenamed, pool.name(), name, text);
        Ok(())
    }
}
