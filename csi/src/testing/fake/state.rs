//! The daemon's rules, as far as the plugin needs them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockd_api::Message as _;
use blockd_api::v1::{self, ErrorKind, VolumeKind};
use tonic::{Code, Status};

use super::{Ranges, State};

/// Extents of the pools.
const EXTENT: u32 = 65_536;

pub(super) fn refused(kind: ErrorKind, code: Code, message: impl Into<String>) -> Status {
    let message = message.into();
    let detail =
        v1::ErrorDetail { kind: kind.into(), message: message.clone(), ..Default::default() };
    Status::with_details(code, message, detail.encode_to_vec().into())
}

pub(super) fn absent(name: &str) -> Status {
    refused(ErrorKind::NotFound, Code::NotFound, format!("{name} does not exist"))
}

fn exists(name: &str) -> Status {
    refused(ErrorKind::Exists, Code::AlreadyExists, format!("{name} exists and is another"))
}

fn in_use(name: &str) -> Status {
    refused(ErrorKind::InUse, Code::FailedPrecondition, format!("volume {name} is attached"))
}

impl State {
    pub(super) fn pool(&self, name: &str) -> Result<String, Status> {
        let mut pools = self.pools.iter();
        let found = if name.is_empty() { pools.next() } else { pools.find(|one| one.0 == name) };
        found.map(|one| one.0.clone()).ok_or_else(|| absent(name))
    }

    pub(super) fn describe_pool(&self, name: &str) -> v1::Pool {
        let at = self.pools.iter().position(|one| one.0 == name).unwrap();
        let size = self.pools[at].1;
        let pool = v1::Pool {
            name: name.to_owned(),
            is_default: at == 0,
            size_bytes: size,
            // Space set aside counts as free until it is written.
            free_bytes: size,
            state: match self.failed.contains(name) {
                true => v1::PoolState::Failed.into(),
                false => v1::PoolState::Open.into(),
            },
            extent_size: EXTENT,
            devices: vec![v1::Device { block_size: 512, ..Default::default() }],
            largest_volume_bytes: size,
            numa_node: -1,
            ..Default::default()
        };
        match self.memory.get(name) {
            Some(memory) => memory.describe(pool),
            None => pool,
        }
    }

    pub(super) fn get(&mut self, pool: &str, name: &str) -> Result<&mut v1::Volume, Status> {
        let key = (self.pool(pool)?, name.to_owned());
        if self.failed.contains(&key.0) {
            return Err(in_use(&key.0));
        }
        self.volumes.get_mut(&key).ok_or_else(|| absent(name))
    }

    pub(super) fn add(
        &mut self,
        pool: &str,
        name: &str,
        kind: VolumeKind,
        size: i64,
    ) -> &mut v1::Volume {
        let id = self.next_id;
        self.next_id += 1;
        let volume = v1::Volume {
            name: name.to_owned(),
            pool: pool.to_owned(),
            block_size: 512,
            id,
            family_id: id,
            size_bytes: size,
            kind: kind.into(),
            made_unix_ms: 1_700_000_000_123,
            settings: Some(v1::VolumeSettings {
                on_full: v1::OnFull::Block.into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        self.volumes.entry((pool.to_owned(), name.to_owned())).or_insert(volume)
    }

    pub(super) fn create(
        &mut self,
        asked: v1::CreateVolumeRequest,
    ) -> Result<v1::CreateVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        assert!(asked.size_bytes > 0 && asked.size_bytes % 512 == 0, "{asked:?}");
        let in_memory = self.memory.contains_key(&pool);
        let changed = match self.get(&pool, &asked.name) {
            Ok(_) if in_memory => false,
            Ok(found) if found.size_bytes == asked.size_bytes => false,
            Ok(_) => return Err(exists(&asked.name)),
            Err(_) if in_memory => self.create_in_memory(&pool, &asked)?,
            Err(_) if asked.erase_after == Some(true) => {
                let message = "erase_after is true: must be left out: the pool can't";
                return Err(refused(ErrorKind::Invalid, Code::InvalidArgument, message));
            }
            Err(_) => {
                self.add(&pool, &asked.name, VolumeKind::Volume, asked.size_bytes);
                true
            }
        };
        let volume = Some(self.get(&pool, &asked.name)?.clone());
        Ok(v1::CreateVolumeResponse { changed, volume })
    }

    pub(super) fn create_in_memory(
        &mut self,
        pool: &str,
        asked: &v1::CreateVolumeRequest,
    ) -> Result<bool, Status> {
        let size = self.pools.iter().find(|one| one.0 == pool).map_or(0, |one| one.1);
        let memory = self.memory.get_mut(pool).expect("a pool in memory");
        let made = memory.create(size, asked).map_err(|detail| {
            let message = detail.message.clone();
            let code = match detail.kind() {
                ErrorKind::NoSpace => Code::ResourceExhausted,
                _ => Code::InvalidArgument,
            };
            Status::with_details(code, message, detail.encode_to_vec().into())
        })?;
        let added = self.add(pool, &asked.name, VolumeKind::Volume, made.size_bytes);
        let (name, id) = (added.name.clone(), added.id);
        let (pool, settings) = (added.pool.clone(), added.settings);
        let kind = VolumeKind::Volume.into();
        *added = v1::Volume { name, pool, id, family_id: id, settings, kind, ..made };
        Ok(true)
    }

    pub(super) fn delete(
        &mut self,
        asked: v1::DeleteVolumeRequest,
    ) -> Result<v1::DeleteVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        let Ok(found) = self.get(&pool, &asked.name) else {
            return Ok(v1::DeleteVolumeResponse::default());
        };
        if found.attached && !asked.force {
            return Err(in_use(&asked.name));
        }
        if let Some(memory) = self.memory.get_mut(&pool) {
            memory.free(&asked.name);
        }
        let volume = self.volumes.remove(&(pool, asked.name));
        for one in self.volumes.values_mut() {
            if volume.as_ref().is_some_and(|gone| gone.id == one.origin_id) {
                one.origin.clear();
            }
        }
        Ok(v1::DeleteVolumeResponse { changed: true, volume, ..Default::default() })
    }

    pub(super) fn resize(
        &mut self,
        asked: v1::ResizeVolumeRequest,
    ) -> Result<v1::ResizeVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        if self.memory.get(&pool).is_some_and(|memory| memory.direct) {
            let message = format!("volume {} is a namespace, and does not grow", asked.name);
            return Err(refused(ErrorKind::InUse, Code::FailedPrecondition, message));
        }
        let found = self.get(&asked.pool, &asked.name)?;
        assert!(asked.size_bytes >= found.size_bytes && asked.size_bytes % 512 == 0, "{asked:?}");
        let changed = found.size_bytes != asked.size_bytes;
        found.size_bytes = asked.size_bytes;
        let volume = Some(found.clone());
        Ok(v1::ResizeVolumeResponse { changed, volume, ..Default::default() })
    }

    pub(super) fn configure(
        &mut self,
        asked: v1::ConfigureVolumeRequest,
    ) -> Result<v1::ConfigureVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        let thick = self.volumes.values().filter(|one| one.pool == pool);
        let thick = thick.filter(|one| one.settings.is_some_and(|settings| settings.thick));
        let taken: i64 = thick.map(|one| one.size_bytes).sum();
        let free = self.describe_pool(&pool).free_bytes - taken;
        let found = self.get(&pool, &asked.name)?;
        let mut settings = found.settings.unwrap_or_default();
        let before = settings;
        let set_aside = if asked.thick == Some(true) && !settings.thick {
            found.size_bytes
        } else {
            asked.reservation_bytes.unwrap_or_default()
        };
        if set_aside > free {
            let message = format!("no space: {set_aside} bytes needed, {free} bytes free");
            return Err(refused(ErrorKind::NoSpace, Code::ResourceExhausted, message));
        }
        settings.thick = asked.thick.unwrap_or(settings.thick);
        settings.iops = asked.iops.unwrap_or(settings.iops);
        settings.bandwidth_bytes = asked.bandwidth_bytes.unwrap_or(settings.bandwidth_bytes);
        settings.quota_bytes = asked.quota_bytes.unwrap_or(settings.quota_bytes);
        settings.reservation_bytes = asked.reservation_bytes.unwrap_or(settings.reservation_bytes);
        if asked.on_full() != v1::OnFull::Unspecified {
            settings.on_full = asked.on_full;
            settings.on_full_timeout_ms = asked.on_full_timeout_ms;
        }
        if asked.placement() != v1::Placement::Unspecified {
            settings.placement = asked.placement;
            found.pinned_to = asked.pin_to;
        }
        found.settings = Some(settings);
        let labels = found.labels.clone();
        found.labels.retain(|key, _| !asked.remove_labels.contains(key));
        found.labels.extend(asked.set_labels);
        let changed = before != settings || labels != found.labels;
        Ok(v1::ConfigureVolumeResponse { changed, volume: Some(found.clone()) })
    }

    pub(super) fn snapshot(
        &mut self,
        asked: v1::CreateSnapshotsRequest,
    ) -> Result<v1::CreateSnapshotsResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        assert!((1..=16).contains(&asked.members.len()), "{asked:?}");
        for member in &asked.members {
            self.get(&pool, &member.volume)?;
        }
        let there = |state: &mut Self, member: &v1::SnapshotMember| {
            state.get(&pool, &member.name).is_ok_and(|found| found.origin == member.volume)
        };
        let count = asked.members.iter().filter(|member| there(self, member)).count();
        let changed = count == 0;
        if !changed && count < asked.members.len() {
            let message = format!("{count} of the snapshots are there");
            return Err(refused(ErrorKind::InUse, Code::FailedPrecondition, message));
        }
        if changed && let Some(one) = asked.members.iter().find(|one| self.has(&pool, &one.name)) {
            return Err(exists(&one.name));
        }
        let mut snapshots = Vec::new();
        for member in &asked.members {
            if changed {
                let source = self.get(&pool, &member.volume)?.clone();
                let size = source.size_bytes;
                let made = self.add(&pool, &member.name, VolumeKind::Snapshot, size);
                made.origin = source.name;
                (made.origin_id, made.family_id) = (source.id, source.family_id);
                made.labels = asked.labels.clone();
            }
            snapshots.push(self.get(&pool, &member.name)?.clone());
        }
        Ok(v1::CreateSnapshotsResponse { changed, snapshots })
    }

    pub(super) fn has(&self, pool: &str, name: &str) -> bool {
        self.volumes.contains_key(&(pool.to_owned(), name.to_owned()))
    }

    pub(super) fn clone_volume(
        &mut self,
        asked: v1::CloneVolumeRequest,
    ) -> Result<v1::CloneVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        let source = self.get(&pool, &asked.snapshot)?.clone();
        assert_eq!(source.kind(), VolumeKind::Snapshot);
        assert!(asked.size_bytes >= source.size_bytes, "{asked:?}");
        let changed = match self.get(&pool, &asked.name) {
            Ok(found) if found.origin == source.name && found.size_bytes == asked.size_bytes => {
                false
            }
            Ok(_) => return Err(exists(&asked.name)),
            Err(_) => {
                let made = self.add(&pool, &asked.name, VolumeKind::Volume, asked.size_bytes);
                made.origin = source.name;
                (made.origin_id, made.family_id) = (source.id, source.family_id);
                true
            }
        };
        let volume = Some(self.get(&pool, &asked.name)?.clone());
        Ok(v1::CloneVolumeResponse { changed, volume })
    }

    pub(super) fn health(
        &mut self,
        asked: v1::HealthRequest,
    ) -> Result<v1::HealthResponse, Status> {
        if self.is_old {
            return Err(Status::unimplemented(""));
        }
        let one = !asked.volume.is_empty();
        let wanted = match asked.pool.is_empty() && !one {
            true => String::new(),
            false => self.pool(&asked.pool)?,
        };
        let is_wanted = |pool: &str| wanted.is_empty() || pool == wanted;
        let causes = |pool: &str, volume: &str| {
            let key = (pool.to_owned(), volume.to_owned());
            let mut causes = self.causes.get(&key).cloned().unwrap_or_default();
            if self.failed.contains(pool) {
                let (code, severity) = (v1::HealthCode::PoolFailed, v1::Severity::Failure);
                let (code, severity) = (code.into(), severity.into());
                let message = format!("pool {pool} has failed");
                let cause = v1::Cause { code, severity, message, ..Default::default() };
                causes = vec![v1::Cause { of_pool: !volume.is_empty(), ..cause }];
            }
            causes
        };
        let severity = |causes: &[v1::Cause]| causes.first().map_or(0, |worst| worst.severity);
        let is_listed = |severity: i32| !asked.abnormal_only || severity != 0;
        let mut answer = v1::HealthResponse::default();
        for (pool, _) in self.pools.iter().filter(|of| is_wanted(&of.0) && !one) {
            let causes = causes(pool, "");
            let severity = severity(&causes);
            if is_listed(severity) {
                let pool = pool.clone();
                answer.pools.push(v1::PoolHealth { pool, severity, causes, ..Default::default() });
            }
        }
        for (pool, volume) in self.volumes.keys().filter(|key| is_wanted(&key.0)) {
            let causes = causes(pool, volume);
            let severity = severity(&causes);
            if is_listed(severity) && (!one || *volume == asked.volume) {
                answer.volumes.push(v1::VolumeHealth {
                    pool: pool.clone(),
                    volume: volume.clone(),
                    severity,
                    causes,
                    ..Default::default()
                });
            }
        }
        let key = (wanted, asked.volume);
        if one && !self.volumes.contains_key(&key) {
            return Err(absent(&key.1));
        }
        Ok(answer)
    }

    pub(super) fn differences(&mut self, asked: v1::DiffVolumeRequest) -> Result<Ranges, Status> {
        self.get(&asked.pool, &asked.name)?;
        if !asked.since.is_empty() {
            self.get(&asked.pool, &asked.since)?;
        }
        let script = self.script.clone().expect("a script of the stream");
        self.streams.opened.fetch_add(1, Ordering::SeqCst);
        let counts = Arc::clone(&self.streams);
        Ok(Ranges { script, request: asked, number: 0, counts, is_over: false })
    }

    pub(super) fn list(
        &mut self,
        asked: v1::ListVolumesRequest,
    ) -> Result<v1::ListVolumesResponse, Status> {
        assert!(asked.brief, "shared bytes are not requested");
        if self.failed.contains(&asked.pool) {
            return Err(in_use(&asked.pool));
        }
        let volumes = self.volumes.values();
        let volumes = volumes.filter(|one| asked.pool.is_empty() || one.pool == asked.pool);
        let volumes = volumes.filter(|one| !self.failed.contains(&one.pool));
        // Cells on other hosts are no pools here.
        let volumes = volumes.filter(|one| self.pools.iter().any(|pool| pool.0 == one.pool));
        Ok(v1::ListVolumesResponse { volumes: volumes.cloned().collect(), releasing: Vec::new() })
    }
}
