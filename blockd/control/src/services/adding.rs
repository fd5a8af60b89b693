//! A volume that is created, set and attached by one call: all of it, or nothing.

use blockd_api::v1;
use blockd_engine::pool::{Placement, PoolHandle};
use blockd_mapper::engine::VolumeSummary;
use blockd_media::error::{Error, shown};
use blockd_media::units::from_wire;

use super::Control;
use super::devices::AttachWish;
use super::labels;
use super::messages::{size_of_request, wish};
use super::settings::{Replaced, Wanted, merged, placement_of};
use super::volumes::{checked_new_name, existing, find, rounded};

/// The parts of a call that are done.
#[derive(Clone, Debug, Default)]
struct Done {
    created: bool,
    /// The settings and labels that were replaced.
    replaced: Replaced,
    attached: bool,
}

/// The volume of a request. A request without one names nothing.
fn volume_of(asked: &v1::AddVolumeRequest) -> Result<&v1::CreateVolumeRequest, Error> {
    asked.create.as_ref().ok_or_else(|| Error::missing("create", "the volume to add"))
}

impl Control {
    /// Checks a request for a volume of extents: its size before rounding, and its block size.
    #[expect(deprecated, reason = "older clients send size_gb")]
    pub(super) fn checked_create(
        &self,
        asked: &v1::CreateVolumeRequest,
    ) -> Result<(u64, Option<u32>), Error> {
        let size = size_of_request(asked.size_bytes, asked.size_gb)?;
        let pool = self.pool(&asked.pool)?;
        let usage = asked.usage().word();
        if let Some(usage) = usage.filter(|_| !pool.is_pmem()) {
            let pool = shown(pool.name());
            let allowed = format!("left out: pool {pool} is not in persistent memory");
            return Err(Error::invalid("usage", usage, allowed));
        }
        if asked.usage() == v1::PmemUsage::AppDirect {
            let allowed = "file-io: what a pool of extents serves can't be mapped by applications";
            return Err(Error::invalid("usage", "app-direct", allowed));
        }
        if asked.erase_after == Some(true) && !pool.erases() {
            let allowed = "left out: what is freed in this pool is not overwritten";
            return Err(Error::invalid("erase_after", true, allowed));
        }
        Ok((size, (asked.block_size != 0).then_some(asked.block_size)))
    }

    /// Adds a volume of extents. After an error everything is as it was before.
    pub(super) async fn add_volume(
        &self,
        asked: &v1::AddVolumeRequest,
    ) -> Result<v1::AddVolumeResponse, Error> {
        let create = volume_of(asked)?;
        let (pool, name) = (create.pool.as_str(), create.name.as_str());
        checked_new_name(name)?;
        let (size, block_size) = self.checked_create(create)?;
        let handle = self.pool(pool)?;
        let size = rounded(&handle, size, from_wire(create.limit_bytes, 0)?)?;
        let wish = asked.attach.as_ref().map(wish);
        let _guard = self.lock(&handle, name).await;
        let placement = match &asked.configure {
            Some(wanted) => placement_of(&handle, wanted).await.map_err(unchanged)?,
            None => None,
        };
        let wanted = asked.configure.as_ref().map(|wanted| (wanted, placement));
        self.check_parts(&handle, name, wanted, wish.as_ref())?;
        let created = self.create_locked(&handle, name, size, block_size).await;
        let mut done = Done { created: created.map_err(unchanged)?, ..Done::default() };
        let volume = existing(&handle, name)?;
        if let Err(error) = self.finish(&handle, &volume, wanted, wish, &mut done).await {
            return Err(self.undo(&handle, &volume, done, &error).await);
        }
        let (created, configured, attached) = (done.created, done.replaced.is_any(), done.attached);
        Ok(v1::AddVolumeResponse {
            changed: created || configured || attached,
            created,
            configured,
            attached,
            volume: Some(self.describe(&handle, name).await?),
        })
    }

    /// Refuses what can be seen to fail before there is a volume.
    fn check_parts(
        &self,
        pool: &PoolHandle,
        name: &str,
        wanted: Option<(&Wanted, Option<Placement>)>,
        wish: Option<&AttachWish>,
    ) -> Result<(), Error> {
        let present = find(pool, name);
        if let Some((wanted, placement)) = wanted {
            let settings = present.as_ref().map(|volume| volume.settings);
            merged(settings.unwrap_or_default(), wanted, placement).map_err(unchanged)?;
            let own = present.as_ref().map(|volume| volume.labels.clone()).unwrap_or_default();
            let labels = labels::changed(&own, &wanted.set_labels, &wanted.remove_labels);
            labels.map_err(unchanged)?;
        }
        let Some(wish) = wish else { return Ok(()) };
        let is_so = match &present {
            Some(volume) => self.is_attached_so(pool, volume, wish).map_err(unchanged)?,
            None => false,
        };
        if !is_so {
            self.front_end(wish).map_err(unchanged)?;
        }
        Ok(())
    }

    /// The parts after the creation.
    async fn finish(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        wanted: Option<(&Wanted, Option<Placement>)>,
        wish: Option<AttachWish>,
        done: &mut Done,
    ) -> Result<(), Error> {
        if let Some((wanted, placement)) = wanted {
            let replaced = &mut done.replaced;
            self.set_locked(pool, volume, (wanted, placement), replaced).await?;
        }
        if let Some(wish) = wish {
            done.attached = self.attach_locked(pool, volume, wish).await?;
        }
        Ok(())
    }

    /// Takes back the parts that are done. Returns the error and the state that results.
    async fn undo(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        done: Done,
        error: &Error,
    ) -> Error {
        let is_created = done.created;
        let undone = match done {
            // Without its volume, a device would serve errors.
            Done { created: true, .. } if self.is_attached(pool.name(), &volume.name) => {
                Err(Error::in_use(format!("volume {}", shown(&volume.name)), "is attached"))
            }
            Done { created: true, .. } => {
                self.delete_locked(pool, volume, &v1::Volume::default()).await
            }
            Done { replaced, .. } => self.set_back(pool, volume, replaced).await,
        };
        let Err(problem) = undone else { return error.with_note(UNCHANGED) };
        let name = shown(&volume.name);
        let left = match is_created {
            true => format!("volume {name} was created and is left, as deleting it failed"),
            false => format!("volume {name} keeps its new settings, as setting them back failed"),
        };
        error.with_note(&format!("{left}: {problem}"))
    }

    /// Adds a volume that is a namespace, and has its device from the start.
    pub(super) async fn add_direct(
        &self,
        asked: v1::AddVolumeRequest,
    ) -> Result<(bool, v1::Volume), Error> {
        let create = volume_of(&asked)?.clone();
        let (configure, attach) = (asked.configure.unwrap_or_default(), asked.attach);
        let named = |pool: &str, name: &str| (pool.to_owned(), name.to_owned());
        let (pool, name) = named(&configure.pool, &configure.name);
        let given = if configure != (Wanted { pool, name, ..Wanted::default() }) {
            Some("a limit or setting")
        } else if attach.is_some_and(|attach| wish(&attach) != AttachWish::default()) {
            Some("a front end")
        } else {
            None
        };
        if let Some(given) = given {
            let what = format!("pool {}", shown(self.pool_name(&create.pool)));
            let allowed = "nothing of the kind: its volumes are the kernel's own devices";
            return Err(Error::invalid(what, given, allowed));
        }
        self.create_direct(create).await
    }
}

/// The state after an error.
const UNCHANGED: &str = "nothing was changed";

/// The error of a part that nothing preceded.
fn unchanged(error: Error) -> Error {
    error.with_note(UNCHANGED)
}
