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

/// Closes one connection of a listener that has had no request for this long. Returns `false` if
/// there is none, or the one that was chosen has become busy too often.
pub(super) async fn displace(threads: &[Shared], listener: u64, idle: Duration) -> bool {
    /// A client may send a request in the moment between the choice and the end.
    const TRIES: u32 = 4;
    let idle = u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX);
    for _ in 0..TRIES {
        let Some(Chosen { worker, info }) = choose(threads, listener, idle) else { return false };
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

/// Of the peer that has the most connections, the one that has been idle for longest. The peer with
/// the most is the first to give way, so that no host can drive out others.
fn choose(threads: &[Shared], listener: u64, idle: u64) -> Option<Chosen> {
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
    let with_idle = peers.into_values().filter(|peer| peer.idlest.is_some());
    let most = with_idle
        .max_by_key(|peer| (peer.count, peer.idlest.as_ref().map_or(0, |(since, _)| *since)))?;
    most.idlest.map(|(_, chosen)| chosen)
}
