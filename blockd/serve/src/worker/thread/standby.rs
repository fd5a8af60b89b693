//! Clients of a pool that is open on another host, or about to be: they stay, and wait.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::super::Target;
use super::{WorkerThread, stats_of};
use crate::Context;

/// A pool whose clients are to wait.
pub(super) struct Standing {
    pub(super) pool: [u8; 16],
    /// The caller, until no request is with the pool.
    answer: Option<oneshot::Sender<()>>,
}

impl WorkerThread {
    /// The places of connections to a pool's volumes.
    fn places_of(&self, pool: [u8; 16]) -> Vec<usize> {
        let shown = self.shown.connections.lock();
        let of_pool = shown.iter().filter(|(_, info)| info.pool == pool);
        let ids: BTreeSet<u64> = of_pool.map(|(id, _)| *id).collect();
        drop(shown);
        let is_of = |id: u64| ids.contains(&id);
        let all = self.connections.iter().enumerate();
        all.filter_map(|(at, one)| Some((at, one.as_ref()?.id)))
            .filter(|&(_, id)| is_of(id))
            .map(|(at, _)| at)
            .collect()
    }

    pub(super) fn stand_by(&mut self, pool: [u8; 16], answer: oneshot::Sender<()>) {
        for at in self.places_of(pool) {
            if let Some(connection) = self.connections[at].as_mut() {
                connection.stand_by();
                self.note(at);
            }
        }
        self.queues.stand_by(pool);
        self.standing.retain(|one| one.pool != pool);
        self.standing.push(Standing { pool, answer: Some(answer) });
    }

    /// Lets go of the volumes of pools whose clients are to wait.
    pub(super) fn rest(&mut self) {
        for one in 0..self.standing.len() {
            let pool = self.standing[one].pool;
            let mut all = true;
            for at in self.places_of(pool) {
                let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
                let Some(connection) = self.connections[at].as_mut() else { continue };
                if connection.rest(&mut context) {
                    self.targets[at] = None;
                    // It may have received the next request.
                    self.note(at);
                } else {
                    all = false;
                }
            }
            let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
            all &= self.queues.rest(pool, &mut context);
            if all && let Some(answer) = self.standing[one].answer.take() {
                let _ = answer.send(());
            }
        }
    }

    /// Answers flushes of a pool's clients from now on.
    pub(super) fn answer_flushes(&mut self, pool: [u8; 16], answer: oneshot::Sender<()>) {
        for at in self.places_of(pool) {
            let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
            if let Some(connection) = self.connections[at].as_mut() {
                connection.answer_flushes(&mut context);
                self.note(at);
            }
        }
        let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
        self.queues.answer_flushes(pool, &mut context);
        let _ = answer.send(());
    }

    /// Answers no flush of a pool's clients on standby any more: it is being opened. Once each
    /// worker has done this, none answers a flush without a commit while another serves writes.
    pub(super) fn hold_flushes(&mut self, pool: [u8; 16]) {
        for at in self.places_of(pool) {
            if let Some(connection) = self.connections[at].as_mut() {
                connection.hold_flushes();
                self.note(at);
            }
        }
        self.queues.hold_flushes(pool);
    }

    /// The client of a connection waits for its volume.
    pub(super) fn demand(&self, at: usize) {
        let Some(connection) = self.connections[at].as_ref() else { return };
        let shown = self.shown.connections.lock();
        if let Some((_, info)) = shown.iter().find(|(id, _)| *id == connection.id) {
            self.parts.demands.add(info.pool);
        }
    }

    /// Serves a pool's clients again. Connections to volumes that are gone are closed.
    pub(super) fn serve(&mut self, pool: [u8; 16], answer: oneshot::Sender<()>) {
        self.standing.retain(|one| one.pool != pool);
        let (worker, volumes) = (self.parts.worker, Arc::clone(&self.shown.volumes));
        let handle = self.executor.pool(pool).cloned();
        for at in self.places_of(pool) {
            let Some(connection) = self.connections[at].as_mut() else { continue };
            let shown = self.shown.connections.lock();
            let info = shown.iter().find(|(id, _)| *id == connection.id);
            let id = info.map(|(_, info)| info.volume);
            drop(shown);
            let served = match (connection.rests(), &handle, id) {
                (false, ..) => Some(None),
                (true, Some(handle), Some(volume)) => {
                    let name = handle.mapper().name_of(volume).unwrap_or_default();
                    let stats = || stats_of(&volumes, Some(handle), &name, worker);
                    let attached = self.executor.attach(pool, volume, stats).ok();
                    if attached.is_some() {
                        self.targets[at] = Some(Target { pool: handle.clone(), volume, name });
                    }
                    attached.map(Some)
                }
                (true, ..) => None,
            };
            let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
            if !served.is_some_and(|volume| connection.serve(volume, &mut context)) {
                connection.hang_up();
            }
            self.note(at);
        }
        let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
        self.queues.serve(pool, &mut context, |spec, executor| {
            let stats = || stats_of(&volumes, handle.as_ref(), &spec.name, worker);
            executor.attach(spec.pool, spec.volume, stats).ok()
        });
        let _ = answer.send(());
    }
}
