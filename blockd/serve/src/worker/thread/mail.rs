//! Messages to a worker: pools, queues, connections that come, move and end.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockd_engine::mailbox::Undelivered;
use blockd_mapper::units::VolumeId;
use tokio::sync::oneshot;

use super::super::{ConnectionInfo, Idle, Mail, Target};
use super::{Closing, WorkerThread, duration_ns, stats_of};
use crate::nbd::Session;
use crate::nbd::session::Connection;
use crate::ublk::{QueueSpec, QueueStandby};
use crate::{Context, FrontendError};

impl WorkerThread {
    /// Gives a connection to another worker, between two of its requests.
    pub(super) fn hand_over(&mut self, at: usize, to: usize) {
        let (Some(threads), Some(moving)) = (self.parts.moves.threads(), self.parts.moves.start())
        else {
            return;
        };
        let Some(thread) = threads.get(to) else { return };
        let Some(connection) = self.connections[at].as_mut() else { return };
        let Ok(stream) = connection.duplicate() else { return };
        let id = connection.id;
        let shown = self.shown.connections.lock();
        let info = shown.iter().find(|(other, _)| *other == id).map(|(_, info)| info.clone());
        drop(shown);
        let (Some(info), Some(target)) = (info, self.targets[at].clone()) else { return };
        let Some(mut connection) = self.connections[at].take() else { return };
        let guard = connection.take_guard();
        self.stalled.retain(|&other| other != at);
        self.forget(at, id);
        let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
        connection.release(&mut context);
        let session = Session {
            volume: target,
            export: info.export,
            negotiated: info.agreed,
            peer: info.peer,
            origin: info.origin,
            guard,
        };
        tracing::debug!(peer = session.peer, export = session.export, to, "moved connection");
        self.parts.stats.moved.add(1);
        thread.load.place();
        let mail = Mail::Connect(stream, Box::new(session), Some(moving));
        match thread.mail.send(mail) {
            Ok(()) => thread.doorbell.ring(),
            // It stays, as if it were new.
            Err(Undelivered::Full(Mail::Connect(stream, session, _))) => {
                thread.load.end();
                self.parts.load.place();
                self.connect(stream, *session);
            }
            Err(_) => {
                thread.load.end();
                tracing::warn!("a worker has ended: a connection is dropped");
            }
        }
    }

    pub(super) fn take_mail(&mut self) {
        while let Some(mail) = self.parts.inbox.take() {
            match mail {
                Mail::AddPool(pool, answer) => {
                    self.hold_flushes(pool.id());
                    let added = self.executor.add_pool(&pool, &mut self.ring);
                    let added = added.map(|slot| pool.add_worker(slot, &self.parts.doorbell));
                    let _ = answer.send(added.map_err(FrontendError::from));
                }
                Mail::RemovePool(pool, answer) => {
                    let is_gone = self.executor.remove_pool(pool, &mut self.ring);
                    if is_gone {
                        self.standing.retain(|one| one.pool != pool);
                    }
                    let _ = answer.send(is_gone);
                }
                Mail::Connect(stream, session, moving) => {
                    self.connect(stream, *session);
                    drop(moving);
                }
                Mail::CloseVolume(pool, volume, answer) => self.close_volume(pool, volume, answer),
                Mail::CloseIdle(id, idle, answer) => {
                    let mut all = self.connections.iter_mut().flatten();
                    let found = all.find(|connection| connection.id == id);
                    let closed = found.is_some_and(|one| one.close_idle(self.now, idle));
                    let _ = answer.send(closed);
                }
                Mail::Drain(limit, answer) => {
                    let limit = duration_ns(limit);
                    self.draining = Some((self.now.saturating_add(limit), answer));
                    self.hang_up(|_| true);
                    self.queues.drain(&mut self.executor);
                }
                Mail::StartQueue(spec, answer) => self.start_queue(*spec, answer),
                Mail::FailWaiting(device) => {
                    let mut context =
                        Context { ring: &mut self.ring, executor: &mut self.executor };
                    self.queues.fail_waiting(device, &mut context);
                }
                Mail::LetWait(device) => self.queues.let_wait(device),
                Mail::StandBy(pool, answer) => self.stand_by(pool, answer),
                Mail::AnswerFlushes(pool, answer) => self.answer_flushes(pool, answer),
                Mail::Serve(pool, answer) => self.serve(pool, answer),
                Mail::StayOn(cpus) => drop(blockd_media::hardening::stay_on(&cpus)),
            }
        }
    }

    fn start_queue(&mut self, spec: QueueSpec, answer: oneshot::Sender<Result<(), FrontendError>>) {
        if self.draining.is_some() {
            self.parts.load.end();
            let _ = answer.send(Err(FrontendError::Gone));
            return;
        }
        let (worker, volumes) = (self.parts.worker, &self.shown.volumes);
        let pool = self.executor.pool(spec.pool).cloned();
        let stats = || stats_of(volumes, pool.as_ref(), &spec.name, worker);
        let volume = match spec.standby {
            QueueStandby::Waits | QueueStandby::Fails => Ok(None),
            QueueStandby::No => self.executor.attach(spec.pool, spec.volume, stats).map(Some),
        };
        let volume = match volume {
            Ok(volume) => volume,
            Err(error) => {
                self.parts.load.end();
                let _ = answer.send(Err(error.into()));
                return;
            }
        };
        self.shown.queues.lock().push(spec.device);
        let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
        let (queues, load) = (&self.shown.queues, &self.parts.load);
        let pool = spec.pool;
        self.queues.start(spec, volume, answer, (queues, load), &mut context);
        if self.standing.iter().any(|one| one.pool == pool) {
            self.queues.stand_by(pool);
        }
    }

    fn connect(&mut self, stream: OwnedFd, session: Session<Target>) {
        let Session { volume: target, export, negotiated, peer, origin, guard } = session;
        if self.draining.is_some() {
            self.parts.load.end();
            return;
        }
        let worker = self.parts.worker;
        let (pool, volume) = (target.pool.id(), target.volume);
        let volumes = &self.shown.volumes;
        let stats = || {
            // Since the client came, the volume may have been renamed.
            let name = target.pool.mapper().name_of(volume);
            let name = name.as_ref().unwrap_or(&target.name);
            stats_of(volumes, Some(&target.pool), name, worker)
        };
        let attached = match self.executor.attach(pool, volume, stats) {
            Ok(attached) => attached,
            Err(error) => {
                tracing::warn!(%error, %peer, %export, "volume detached before the connection was served");
                self.parts.load.end();
                return;
            }
        };
        let id = self.next_id;
        self.next_id += 1;
        let free = self.connections.iter().position(Option::is_none);
        let at = free.unwrap_or(self.connections.len());
        if at == self.connections.len() {
            self.connections.push(None);
            self.targets.push(None);
        }
        let agreed = negotiated.clone();
        let requests = self.parts.options.max_requests;
        let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
        match Connection::new(id, at, stream, negotiated, attached, requests, guard, &mut context) {
            Ok(mut connection) => {
                if self.standing.iter().any(|one| one.pool == pool) {
                    connection.stand_by();
                }
                let in_flight = Arc::clone(&connection.shown);
                let since = Arc::clone(&connection.idle_since);
                let info = ConnectionInfo {
                    id,
                    peer,
                    origin,
                    export,
                    pool,
                    volume,
                    worker,
                    agreed,
                    in_flight,
                    idle: Idle { since, chosen: Arc::default() },
                };
                self.shown.connections.lock().push((id, info));
                self.connections[at] = Some(connection);
                self.targets[at] = Some(target);
                self.parts.stats.connections.add(1);
                self.note(at);
            }
            Err(error) => {
                self.executor.detach(attached);
                self.parts.load.end();
                tracing::warn!(%error, %peer, %export, "a connection can't be served");
            }
        }
    }

    fn close_volume(&mut self, pool: [u8; 16], volume: VolumeId, answer: oneshot::Sender<usize>) {
        let mut ids: Vec<u64> = Vec::new();
        for (id, info) in self.shown.connections.lock().iter() {
            if (info.pool, info.volume) == (pool, volume) {
                ids.push(*id);
            }
        }
        self.hang_up(|connection| ids.contains(&connection.id));
        self.closing.push(Closing { pool, volume, count: ids.len(), answer });
    }

    /// Takes no more requests from some connections.
    fn hang_up(&mut self, which: impl Fn(&Connection) -> bool) {
        for at in 0..self.connections.len() {
            let Some(connection) = self.connections[at].as_mut() else { continue };
            if which(connection) {
                let volume = (!connection.rests()).then_some(connection.volume);
                connection.hang_up();
                if let Some(volume) = volume {
                    self.executor.cancel_parked(volume);
                }
                self.note(at);
            }
        }
    }

    /// Notifies the callers that wait for connections to end.
    pub(super) fn end_closing(&mut self) {
        if self.closing.is_empty() {
            return;
        }
        let shown = self.shown.connections.lock();
        let mut still = Vec::new();
        for one in self.closing.drain(..) {
            let key = (one.pool, one.volume);
            if shown.iter().any(|(_, info)| (info.pool, info.volume) == key) {
                still.push(one);
            } else {
                let _ = one.answer.send(one.count);
            }
        }
        drop(shown);
        self.closing = still;
    }

    pub(super) fn is_drained(&self) -> bool {
        let Some((deadline, _)) = &self.draining else { return false };
        let quiet = self.connections.iter().all(Option::is_none) && self.queues.busy() == 0;
        quiet || self.now >= *deadline
    }
}
