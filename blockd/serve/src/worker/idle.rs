//! Which idle connection gives way when a listener is full.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::{ConnectionInfo, Mail, Shared};
use crate::nbd::Peer;

/// The connection that was chosen, and its worker.
struct Chosen {
    worker: usize,
    info: ConnectionInfo,
}

/// A peer's connections.
#[derive(Default)]
struct OfPeer {
    count: usize,
    /// The one that has been idle for longest, and how long.
    idlest: Option<(u64, Chosen)>,
}

/// Closes one connection of a listener that has had no request for this long, to make room for one
/// of the peer `newcomer`. That has at least as many as are given with it: some may not be at a
/// worker yet. Returns `false` if there is none, or the one that was chosen has become busy too
/// often.
pub(super) async fn displace(
    threads: &[Shared],
    listener: u64,
    newcomer: (Peer, usize),
    idle: Duration,
) -> bool {
    /// A client may send a request in the moment between the choice and the end.
    const TRIES: u32 = 4;
    let idle = u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX);
    for _ in 0..TRIES {
        let Some(Chosen { worker, info }) = choose(threads, listener, newcomer, idle) else {
            return false;
        };
        if info.idle.chosen.swap(true, Ordering::Relaxed) {
            // Another newcomer has chosen it at the same time.
            continue;
        }
        let (send, receive) = oneshot::channel();
        threads[worker].post(Mail::CloseIdle(info.id, idle, send)).await;
        if receive.await.unwrap_or(false) {
            tracing::info!(
                peer = info.peer,
                export = info.export,
                "closed an idle connection: its listener is full (nbd.max_connections)"
            );
            return true;
        }
        info.idle.chosen.store(false, Ordering::Relaxed);
    }
    false
}

/// Of the peer that has the most connections, the one that has been idle for longest. A peer gives
/// way to itself and to peers with fewer connections than it, so that none can drive out others:
/// not even with connections of its own that are all at work.
fn choose(
    threads: &[Shared],
    listener: u64,
    (newcomer, has): (Peer, usize),
    idle: u64,
) -> Option<Chosen> {
    let mut peers: HashMap<Peer, OfPeer> = HashMap::new();
    for (worker, thread) in threads.iter().enumerate() {
        let now = thread.clock.ns();
        for (_, info) in thread.connections.lock().iter() {
            if info.origin.listener != listener {
                continue;
            }
            let of_peer = peers.entry(info.origin.peer).or_default();
            of_peer.count += 1;
            let since = now.saturating_sub(info.idle.since.get());
            let is_idle = info.in_flight.get() == 0 && since >= idle;
            let is_idlest = of_peer.idlest.as_ref().is_none_or(|(most, _)| since > *most);
            if is_idle && is_idlest && !info.idle.chosen.load(Ordering::Relaxed) {
                of_peer.idlest = Some((since, Chosen { worker, info: info.clone() }));
            }
        }
    }
    let has = peers.get(&newcomer).map_or(0, |peer| peer.count).max(has);
    let (_, (_, chosen)) = peers
        .into_iter()
        .filter(|(peer, of_peer)| *peer == newcomer || of_peer.count > has)
        .filter_map(|(_, of_peer)| Some((of_peer.count, of_peer.idlest?)))
        .max_by_key(|(count, (since, _))| (*count, *since))?;
    Some(chosen)
}
