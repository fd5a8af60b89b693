//! Descriptions of nodes: the known ones, and this node's parts of its pools.

use blockd_api::v1;
use blockd_engine::stats::VolumeStats;
use blockd_media::clock::wall_ms;
use blockd_media::error::Error;
use blockd_media::units::to_wire;

use crate::config::PoolConfig;
use crate::node::NodeId;
use crate::pool::{self, PoolSpace};

use super::extend::Waiting;
use super::membership::{DeadNode, LastOwner, NodeName, dead_nodes, last_owner};
use super::{Control, Known, blocking, pool_error};

impl Control {
    /// This node's objects in a pool.
    pub(super) fn node_objects(&self, space: &PoolSpace) -> Vec<v1::NodeObject> {
        let Some(node) = self.0.options.node else { return Vec::new() };
        let object = |name, kind: v1::NodeObjectKind, total, used| v1::NodeObject {
            name,
            kind: kind.into(),
            total_bytes: to_wire(total),
            used_bytes: to_wire(used),
        };
        let (free, journal) = (v1::NodeObjectKind::Free, v1::NodeObjectKind::Journal);
        vec![
            object(node.free_object(), free, space.pool.reserved, 0),
            object(node.journal_object(), journal, space.pool.log, space.pool.log_used),
        ]
    }

    fn this_node(&self) -> v1::Node {
        let open = |known: &Known| known.failure().is_none();
        let pools = self.known_pools().into_iter().filter(open).map(|known| known.config.name);
        v1::Node {
            id: self.0.options.node.map(|id| id.to_string()).unwrap_or_default(),
            state: v1::NodeState::This.into(),
            pools: pools.collect(),
            dead_unix_ms: 0,
        }
    }

    /// All nodes that are known here.
    pub(super) async fn describe_nodes(&self) -> Result<Vec<v1::Node>, Error> {
        let failed = self.known_pools().into_iter().filter(|known| known.state.is_err());
        let failed: Vec<PoolConfig> = failed.map(|known| known.config).collect();
        let state_dir = self.0.options.state_dir.clone();
        let own = self.0.options.node.map_or(0, NodeId::number);
        let (dead, left) = blocking(move || {
            // A failed look is reported as the pool's failure.
            let owner = |pool: PoolConfig| Some((last_owner(&pool).ok()??, pool.name));
            let is_left = |owner: &LastOwner| !owner.clean && ![0, own].contains(&owner.number);
            let left = failed.into_iter().filter_map(owner).filter(|(owner, _)| is_left(owner));
            Ok((dead_nodes(&state_dir)?, left.collect::<Vec<_>>()))
        })
        .await?;
        let mut nodes = vec![self.this_node()];
        nodes.extend(others(&dead, &left));
        nodes.extend(self.dead_host_nodes().await);
        Ok(nodes)
    }

    /// This node's pools, and those that it waits for.
    pub(super) async fn describe_node_status(
        &self,
        pool: &str,
    ) -> Result<v1::NodeStatusResponse, Error> {
        let known = if pool.is_empty() { self.known_pools() } else { vec![self.known(pool)?] };
        let mut pools = Vec::new();
        for one in known {
            pools.push(self.describe_node_pool(one).await?);
        }
        Ok(v1::NodeStatusResponse { node: Some(self.this_node()), pools })
    }

    async fn describe_node_pool(&self, known: Known) -> Result<v1::NodePool, Error> {
        let name = known.config.name.clone();
        let waiting = self.extends_waiting(&name).into_iter().map(waiting).collect();
        let failure = known.failure();
        let (Ok(handle), None) = (&known.state, &failure) else {
            return Ok(v1::NodePool {
                name,
                state: known.wire_state().into(),
                failure: failure.unwrap_or_default(),
                waiting,
                ..Default::default()
            });
        };
        let space = pool::space(handle).await.map_err(|error| pool_error(&name, error))?;
        let stats = self.data_path().volume_stats();
        let mine = || stats.iter().filter(|one| one.pool.is(&name));
        let sum = |of: &dyn Fn(&VolumeStats) -> u64| {
            mine().map(|one| of(one)).fold(0, u64::saturating_add)
        };
        let blocked_writes = sum(&|one| one.blocked.get());
        let blocked_ns = mine().map(|one| one.blocked_ns.get()).max().unwrap_or(0);
        let since = wall_ms().saturating_sub(to_wire(blocked_ns / 1_000_000));
        Ok(v1::NodePool {
            state: v1::PoolState::Open.into(),
            failure: String::new(),
            epoch: handle.epoch(),
            objects: self.node_objects(&space),
            free_bytes: to_wire(space.free()),
            waiting,
            parked: sum(&|one| one.parked.get()),
            blocked_writes,
            blocked_since_unix_ms: if blocked_writes > 0 { since } else { 0 },
            name,
        })
    }
}

fn waiting(one: Waiting) -> v1::WaitingRequest {
    v1::WaitingRequest {
        volume: one.volume,
        peer: one.peer,
        since_unix_ms: one.since_unix_ms,
        room_bytes: to_wire(one.room),
    }
}

/// Nodes that were declared dead, and those that have left a pool without closing it.
fn others(dead: &[DeadNode], left: &[(LastOwner, String)]) -> Vec<v1::Node> {
    let mut nodes: Vec<(NodeName, v1::Node)> = Vec::new();
    for one in dead {
        let Some(name) = one.name() else { continue };
        let node = v1::Node {
            id: name.to_string(),
            state: v1::NodeState::Dead.into(),
            pools: one.pools.clone(),
            dead_unix_ms: one.dead_unix_ms,
        };
        nodes.push((name, node));
    }
    for (owner, pool) in left {
        let name = NodeName::of_number(owner.number);
        let known = nodes.iter().position(|(other, _)| other.is(&name));
        let at = known.unwrap_or_else(|| {
            nodes.push((name, v1::Node { id: name.to_string(), ..Default::default() }));
            nodes.len() - 1
        });
        let node = &mut nodes[at].1;
        // One that was declared dead has come back meanwhile.
        if node.state() != v1::NodeState::Unknown {
            node.set_state(v1::NodeState::Unknown);
            node.pools.clear();
        }
        node.pools.push(pool.clone());
    }
    nodes.into_iter().map(|(_, node)| node).collect()
}
