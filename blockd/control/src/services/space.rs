//! The space of volumes and snapshots, by themselves and together.

use std::collections::BTreeMap;

use blockd_api::v1;
use blockd_engine::pool::{Figures, VolumeId};
use blockd_mapper::engine::{MAX_ACCOUNTED, VolumeSummary};
use blockd_media::error::Error;
use blockd_media::units::to_wire;

use super::Control;
use super::messages::kind;
use super::volumes::{existing, of};

impl Control {
    /// The space of some volumes of a pool, or of all; and where they are named, of all of these
    /// together.
    pub(super) async fn describe_space(
        &self,
        asked: &v1::SpaceRequest,
    ) -> Result<v1::SpaceResponse, Error> {
        let handle = self.pool(&asked.pool)?;
        if asked.names.len() > MAX_ACCOUNTED {
            let allowed = format!("at most {MAX_ACCOUNTED} volumes to be counted together");
            return Err(Error::invalid("names", asked.names.len(), allowed));
        }
        let all = handle.mapper().summaries();
        let mut wanted: Vec<VolumeSummary> = Vec::new();
        for name in &asked.names {
            let volume = existing(&handle, name)?;
            if wanted.iter().all(|other| other.id != volume.id) {
                wanted.push(volume);
            }
        }
        let together = wanted.len() > 1;
        let origins: BTreeMap<VolumeId, String> =
            all.iter().map(|one| (one.id, one.name.clone())).collect();
        if asked.names.is_empty() {
            wanted = all;
            wanted.sort_by(|one, other| one.name.cmp(&other.name));
        }
        let unmet: Vec<u64> = wanted.iter().map(|one| one.unmet).collect();
        let mut sets: Vec<Vec<VolumeId>> = wanted.iter().map(|one| vec![one.id]).collect();
        if together {
            sets.push(wanted.iter().map(|one| one.id).collect());
        }
        let counted = handle.figures(sets).await.map_err(|error| of(&handle, error))?;
        let mut counted = counted.into_iter();
        let mut volumes = Vec::new();
        for ((one, unmet), figures) in wanted.into_iter().zip(&unmet).zip(counted.by_ref()) {
            let figures = match figures {
                Ok(figures) => figures,
                // Deleted meanwhile; where it was named, that is an error.
                Err(_) if asked.names.is_empty() => continue,
                Err(error) => return Err(of(&handle, error)),
            };
            volumes.push(v1::VolumeSpace {
                kind: kind(one.kind).into(),
                origin: origins.get(&one.origin).cloned().unwrap_or_default(),
                name: one.name,
                space: Some(message(&figures, *unmet)),
            });
        }
        let together = counted.next().transpose().map_err(|error| of(&handle, error))?;
        let together = together.as_ref().map(|all| message(all, unmet.iter().sum()));
        Ok(v1::SpaceResponse { volumes, together })
    }
}

fn message(figures: &Figures, unmet: u64) -> v1::Space {
    v1::Space {
        mapped_bytes: to_wire(figures.mapped),
        valid_bytes: to_wire(figures.valid),
        exclusive_bytes: to_wire(figures.exclusive),
        shared_bytes: to_wire(figures.shared),
        reserved_bytes: to_wire(figures.reserved),
        gives_back_bytes: to_wire(figures.gives_back()),
        exact: figures.exact,
        set_aside_free_bytes: to_wire(unmet),
    }
}
