//! Places for connections: of a listener as a whole, and of each host among its clients.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::listener::ListenerStats;
use super::{Peer, Sessions};

/// A connection with an export has one until it ends.
#[derive(Debug)]
pub(super) struct Place {
    _permit: OwnedSemaphorePermit,
    _peer: PeerPlace,
}

/// How long it may take to close a connection that is idle: a worker does it in its next turn.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// How often another one is chosen, when the one that was chosen sent a request meanwhile.
const TRIES: u32 = 4;

/// A listener's places for connections that have an export.
#[derive(Debug)]
pub(super) struct Places {
    free: Arc<Semaphore>,
    /// How many of the places each host has, also of connections that are not served yet.
    hosts: Arc<Hosts>,
    /// The listener's number.
    listener: u64,
    /// A connection without a request for this long gives way to a new one.
    idle_time: Duration,
    stats: Arc<ListenerStats>,
}

impl Places {
    pub(super) fn new(
        count: usize,
        listener: u64,
        idle_time: Duration,
        stats: Arc<ListenerStats>,
    ) -> Self {
        let free = Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        Self { free, hosts: Hosts::new(usize::MAX), listener, idle_time, stats }
    }

    /// A place for a connection of `peer`, if there is one or an idle connection gives one up.
    pub(super) async fn take<V>(&self, sessions: &impl Sessions<V>, peer: Peer) -> Option<Place> {
        if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
            return self.place(permit, peer);
        }
        for _ in 0..TRIES {
            let has = self.hosts.count(peer);
            if !sessions.displace_idle(self.listener, peer, has, self.idle_time).await {
                break;
            }
            self.stats.idle_displaced.fetch_add(1, Ordering::Relaxed);
            let freed = Arc::clone(&self.free).acquire_owned();
            if let Ok(Ok(permit)) = tokio::time::timeout(CLOSE_TIME, freed).await {
                return self.place(permit, peer);
            }
        }
        self.stats.full_refused.fetch_add(1, Ordering::Relaxed);
        None
    }

    fn place(&self, permit: OwnedSemaphorePermit, peer: Peer) -> Option<Place> {
        Some(Place { _permit: permit, _peer: self.hosts.admit(peer)? })
    }
}

/// How many connections each host has, from accept on.
#[derive(Debug)]
pub(super) struct Hosts {
    limit: usize,
    counts: Mutex<HashMap<IpAddr, usize>>,
}

impl Hosts {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, counts: Mutex::default() })
    }

    /// Connections of a peer; 0 for processes of this host.
    fn count(&self, peer: Peer) -> usize {
        let Peer::Host(host) = peer else { return 0 };
        self.counts.lock().get(&host).copied().unwrap_or(0)
    }

    /// A place for one more connection of a peer; `None` if it has as many as it may. Processes of
    /// this host are not limited: the permissions of the Unix socket decide who may connect.
    pub(super) fn admit(self: &Arc<Self>, peer: Peer) -> Option<PeerPlace> {
        let Peer::Host(host) = peer else { return Some(PeerPlace(None)) };
        let mut counts = self.counts.lock();
        let count = counts.entry(host).or_default();
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        drop(counts);
        Some(PeerPlace(Some((Arc::clone(self), host))))
    }
}

/// The place of a connection among those of its host.
#[derive(Debug)]
pub(super) struct PeerPlace(Option<(Arc<Hosts>, IpAddr)>);

impl Drop for PeerPlace {
    fn drop(&mut self) {
        let Some((hosts, host)) = &self.0 else { return };
        let mut counts = hosts.counts.lock();
        if let Some(count) = counts.get_mut(host) {
            *count -= 1;
            if *count == 0 {
                counts.remove(host);
            }
        }
    }
}

/// All places of a connection, held by its session and by the relay of its TLS: a socket that is
/// still open counts.
#[derive(Debug)]
pub(super) struct Held {
    _place: Option<Place>,
    _peer: PeerPlace,
}

impl Held {
    pub(super) const fn new(place: Option<Place>, peer: PeerPlace) -> Self {
        Self { _place: place, _peer: peer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_its_limit_and_no_other_hosts() {
        let hosts = Hosts::new(2);
        let [one, other] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(|ip| Peer::Host(IpAddr::from(ip)));
        let held = [hosts.admit(one), hosts.admit(one)];
        assert!(held.iter().all(Option::is_some));
        assert!(hosts.admit(one).is_none());
        assert!(hosts.admit(other).is_some());
        drop(held);
        assert!(hosts.admit(one).is_some());
        assert!(hosts.counts.lock().is_empty(), "hosts without connections take no memory");
    }

    #[test]
    fn processes_of_this_host_are_not_limited() {
        let hosts = Hosts::new(1);
        let held: Vec<_> = (0..10).map(|_| hosts.admit(Peer::Process(7))).collect();
        assert!(held.iter().all(Option::is_some));
    }
}
