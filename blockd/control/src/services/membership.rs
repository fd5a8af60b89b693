//! Nodes that have left: this node takes over their pools. Works on the devices themselves, for
//! which no daemon may have them.
//!
//! The order is always the same. Nothing is changed before the owner lock was seen to be free and
//! every script of the hook directory has ended well. Then, pool by pool: the lock is taken, the
//! log replayed, the pool closed in order by this node, and the lock given back.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_engine::pool;
use blockd_inspect::Reader;
use blockd_media::clock::wall_ms;
use blockd_media::error::{Error, shown};
use blockd_media::pool::{Access, Offline, PoolError, PoolSpec, is_there};
use serde::{Deserialize, Serialize};

use crate::config::{DeviceConfig, DeviceKind, NodeConfig, PoolConfig};
use crate::hook::{self, Ran};
use crate::node::NodeId;

use super::deleting::lies_elsewhere;
use super::opening::{Remembered, config_of};
use super::pool_error;
use super::pools::{Opener, spec};
use super::served::ServedPools;
use super::state_file::StateFile;

/// How long the lock of a pool's last owner is waited for: the IO of a process that has died ends
/// within that, and one that lives keeps it.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// Which node is meant: by its UUID, or by what stands for it on media.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeName {
    number: u32,
    id: Option<NodeId>,
}

impl NodeName {
    /// Reads a UUID, or its first eight digits.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let number = || {
            let is_number = text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let number = is_number.then(|| u32::from_str_radix(text, 16).ok()).flatten();
            number.filter(|number| *number != 0).map(|number| Self { number, id: None })
        };
        let id = NodeId::parse(text).map(Self::of);
        let allowed = "a UUID, or its first eight digits, as `blockd node list` shows it";
        id.or_else(number).ok_or_else(|| Error::invalid("node", text, allowed))
    }

    pub(super) const fn of(id: NodeId) -> Self {
        Self { number: id.number(), id: Some(id) }
    }

    /// A node of which only that is known.
    pub(super) const fn of_number(number: u32) -> Self {
        Self { number, id: None }
    }

    /// Whether two names may be of one node, as far as known.
    pub(super) fn is(&self, other: &Self) -> bool {
        let same_id = self.id.is_none() || other.id.is_none() || self.id == other.id;
        self.number == other.number && same_id
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.id {
            Some(id) => id.fmt(f),
            None => write!(f, "{:08x}", self.number),
        }
    }
}

/// A node that was declared dead, as it is remembered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct DeadNode {
    /// As [`NodeName`] reads it.
    node: String,
    pub(super) dead_unix_ms: i64,
    /// Pools that were taken over from it.
    pub(super) pools: Vec<String>,
}

impl DeadNode {
    pub(super) fn name(&self) -> Option<NodeName> {
        NodeName::parse(&self.node).ok()
    }
}

/// Nodes that were declared dead and not forgotten.
pub(super) fn dead_nodes(state_dir: &Path) -> Result<Vec<DeadNode>, Error> {
    file(state_dir).read()
}

fn file(state_dir: &Path) -> StateFile {
    StateFile::new(state_dir, "nodes.json")
}

/// The last owner of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LastOwner {
    /// 0 where it was not known.
    pub(super) number: u32,
    pub(super) clean: bool,
}

/// The last owner of a pool, from its devices; `None` where there is no pool yet, or only a
/// volatile one. Takes no lock.
pub(super) fn last_owner(config: &PoolConfig) -> Result<Option<LastOwner>, Error> {
    // Memory of this host is no other's, and is looked at when it is opened.
    if config.region.is_some() {
        return Ok(None);
    }
    let devices = &config.devices;
    if devices.iter().any(|one| one.kind == DeviceKind::Memory || !is_there(&one.path)) {
        return Ok(None);
    }
    let mut is_there_yet = false;
    for device in devices {
        is_there_yet |= holds_pool(config, device)?;
    }
    if !is_there_yet {
        return Ok(None);
    }
    let mut devices = open(config, Access::Look)?;
    let present = devices.present().to_vec();
    let reader = Reader::open(&mut devices, &present);
    let reader = reader.map_err(|error| pool_error(&config.name, error.into()))?;
    let found = reader.superblock();
    Ok(Some(LastOwner { number: found.node, clean: found.clean }))
}

fn open(config: &PoolConfig, access: Access) -> Result<Offline, Error> {
    // A spare that has joined is one of its devices. As when the pool is opened, one of another
    // pool is left out, and so is one that can't be read: the pool reports it if it needs it.
    let mut paths: Vec<PathBuf> = config.devices.iter().map(|one| one.path.clone()).collect();
    let pool_on = |device: &DeviceConfig| {
        blockd_media::pool::identity(&of_device(config, device)).ok().flatten()
    };
    if !config.spares.is_empty() {
        let own = config.devices.iter().find_map(pool_on);
        let is_own = |spare: &&DeviceConfig| {
            pool_on(spare).is_some_and(|found| own.is_none_or(|own| own == found))
        };
        paths.extend(config.spares.iter().filter(is_own).map(|spare| spare.path.clone()));
    }
    Offline::open(&paths, access, config.claim_wait).map_err(|error| refused(&config.name, error))
}

/// Whether a pool is on this one of its devices, perhaps another one.
fn holds_pool(config: &PoolConfig, device: &DeviceConfig) -> Result<bool, Error> {
    let holds = blockd_media::pool::exists(&of_device(config, device));
    holds.map_err(|error| refused(&config.name, error))
}

/// The pool as if it had this device alone.
fn of_device(config: &PoolConfig, device: &DeviceConfig) -> PoolSpec {
    let alone = PoolConfig { devices: vec![device.clone()], ..config.clone() };
    spec(&alone, Path::new(""))
}

fn refused(pool: &str, error: PoolError) -> Error {
    match error {
        PoolError::Locked { .. } => {
            let problem = "is in use on this host: its owner lives, or its IO has not ended";
            Error::in_use(format!("pool {pool}"), problem)
        }
        other => pool_error(pool, other),
    }
}

/// A pool that was taken over.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Its name.
    pub pool: String,
    /// Changes replayed from the log.
    pub log_changes: u64,
    /// Changes replayed from the delta ring.
    pub ring_changes: u64,
}

/// The result of the removal of a node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Left {
    /// False: it was so already.
    pub changed: bool,
    /// The pools that were taken over now.
    pub pools: Vec<Taken>,
    /// The pools that can't be read: whether they name the node is not known.
    pub unread: Vec<Unread>,
}

/// A pool that can't be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unread {
    /// Its name.
    pub pool: String,
    /// Why.
    pub problem: String,
}

/// The request to remove a node.
#[derive(Clone, Copy, Debug)]
pub struct Leave {
    /// The node.
    pub node: NodeName,
    /// Take pools over although that loses writes of it that were answered and not flushed.
    pub accept_loss: bool,
}

/// The part of this host's configuration that the removal of a node needs.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig<'a> {
    /// Where delta rings are.
    pub runtime_dir: &'a Path,
    /// The folder of the daemon's state.
    pub state_dir: &'a Path,
    /// Pools that are opened at start.
    pub pools: &'a [PoolConfig],
    /// The only one of these is the one by default, of a configuration that names none.
    pub has_implied_pool: bool,
    /// The template of pools that are created at run time.
    pub template: &'a PoolConfig,
    /// This host.
    pub node: &'a NodeConfig,
}

/// A pool that names the node as its last owner.
struct Owned {
    config: PoolConfig,
    clean: bool,
}

/// The state of a node on this host.
struct Membership<'a> {
    config: HostConfig<'a>,
    leave: Leave,
    owned: Vec<Owned>,
    unread: Vec<Unread>,
    dead: Vec<DeadNode>,
}

/// Declares a node dead: its pools are recovered and closed, so that this node may open them.
/// `report` gets each script as it has run.
pub fn declare_dead(
    config: HostConfig<'_>,
    leave: Leave,
    report: &mut dyn FnMut(&Ran),
) -> Result<Left, Error> {
    let mut members = Membership::look(config, leave, "declared dead")?;
    let dirty: Vec<PoolConfig> = members.dirty().map(|one| one.config.clone()).collect();
    if members.record().is_some() && dirty.is_empty() {
        return Ok(Left { unread: members.unread, ..Left::default() });
    }
    members.fence(&dirty)?;
    members.run_hooks("pre-declare-dead.d", &dirty, report)?;
    let (pools, failure) = members.take(&dirty);
    if failure.is_none() || !pools.is_empty() {
        members.remember(&pools)?;
    }
    match failure {
        Some(error) => Err(error),
        None => Ok(Left { changed: true, pools, unread: members.unread }),
    }
}

/// Forgets a node that was declared dead, or with `force` any: no pool names it any more, apart
/// from those that can't be read, which `force` leaves out.
pub fn forget(
    config: HostConfig<'_>,
    leave: Leave,
    force: bool,
    report: &mut dyn FnMut(&Ran),
) -> Result<Left, Error> {
    let mut members = Membership::look(config, leave, "forgotten")?;
    let alive = members.record().is_none() || members.dirty().next().is_some();
    if alive && !force {
        let what = format!("node {}", leave.node);
        let problem = "may be alive: `blockd node declare-dead` first, or use force";
        return Err(Error::in_use(what, problem));
    }
    if !force {
        members.check_read()?;
    }
    let owned: Vec<PoolConfig> = members.owned.iter().map(|one| one.config.clone()).collect();
    members.fence(&owned)?;
    members.run_hooks("pre-forget.d", &owned, report)?;
    let (pools, failure) = members.take(&owned);
    if let Some(error) = failure {
        if !pools.is_empty() {
            members.remember(&pools)?;
        }
        return Err(error);
    }
    members.dead.retain(|one| !one.name().is_some_and(|name| name.is(&leave.node)));
    file(config.state_dir).write(members.dead)?;
    Ok(Left { changed: true, pools, unread: members.unread })
}

impl<'a> Membership<'a> {
    /// Looks at every pool of this host. A node that nothing names is an error, and so is this one.
    /// A pool that can't be read keeps no other from being taken over.
    fn look(config: HostConfig<'a>, leave: Leave, what: &str) -> Result<Self, Error> {
        let own = config.node.id.map(NodeName::of);
        let Some(own) = own else {
            let allowed = "given, as this host has no identity: a UUID";
            return Err(Error::invalid("node.id", "", allowed));
        };
        if own.number == leave.node.number {
            let allowed = format!("another node: this one runs, and can't be {what}");
            return Err(Error::invalid("node", leave.node, allowed));
        }
        let (mut owned, mut unread, mut first_error) = (Vec::new(), Vec::new(), None);
        for config in pools(config)? {
            match last_owner(&config) {
                Ok(Some(owner)) if owner.number == leave.node.number => {
                    owned.push(Owned { config, clean: owner.clean });
                }
                Ok(_) => {}
                Err(error) => {
                    let (pool, problem) = (config.name, error.to_string());
                    let note = format!("no other pool names node {}", leave.node);
                    first_error = first_error.or_else(|| Some(error.with_note(&note)));
                    unread.push(Unread { pool, problem });
                }
            }
        }
        let members = Self { config, leave, owned, unread, dead: dead_nodes(config.state_dir)? };
        if members.owned.is_empty() && members.record().is_none() {
            let unknown = || Error::not_found("node", &leave.node.to_string());
            return Err(first_error.unwrap_or_else(unknown));
        }
        Ok(members)
    }

    /// Refuses where the node may be the last owner of a pool that can't be read: the record of a
    /// dead node is all that says that the pool is to be taken over.
    fn check_read(&self) -> Result<(), Error> {
        if self.unread.is_empty() {
            return Ok(());
        }
        let pools = self.unread.iter().map(|one| format!("{} ({})", shown(&one.pool), one.problem));
        let pools = pools.collect::<Vec<_>>().join(", ");
        let problem = format!(
            "may own pools that can't be read: {pools}; repair them or take them out of the \
             configuration, or use --force to forget the node without them"
        );
        Err(Error::in_use(format!("node {}", self.leave.node), problem))
    }

    fn dirty(&self) -> impl Iterator<Item = &Owned> {
        self.owned.iter().filter(|one| !one.clean)
    }

    fn record(&self) -> Option<&DeadNode> {
        self.dead.iter().find(|one| one.name().is_some_and(|name| name.is(&self.leave.node)))
    }

    /// Checks that no process on this host has one of these pools open, before any change.
    fn fence(&self, pools: &[PoolConfig]) -> Result<(), Error> {
        pools.iter().try_for_each(|pool| open(pool, Access::Write).map(drop))
    }

    fn run_hooks(
        &self,
        folder: &str,
        pools: &[PoolConfig],
        report: &mut dyn FnMut(&Ran),
    ) -> Result<(), Error> {
        let failed = |error: hook::HookError| {
            let node = self.leave.node;
            let problem = format!("stays as it is: {error}");
            Error::in_use(format!("node {node}"), problem)
        };
        let node = self.leave.node.to_string();
        // A name has no line feed.
        let names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
        let names = names.join("\n");
        let variables = [("BLOCKD_NODE", node.as_str()), ("BLOCKD_POOLS", names.as_str())];
        let NodeHooks { folder, limit } = self.hooks(folder);
        hook::run_all(&folder, &[&node], &variables, limit, report).map_err(failed)
    }

    fn hooks(&self, folder: &str) -> NodeHooks {
        let node = &self.config.node;
        NodeHooks { folder: node.hooks_dir.join(folder), limit: node.hook_timeout }
    }

    /// Takes pools over, one after the other. One that fails does not hold the others up: the error
    /// is that of the first, and names the others, and the pools that were taken over.
    fn take(&self, pools: &[PoolConfig]) -> (Vec<Taken>, Option<Error>) {
        let (mut taken, mut failed) = (Vec::new(), Vec::new());
        for pool in pools {
            match self.take_one(pool) {
                Ok(pool) => taken.push(pool),
                Err(error) => failed.push(error),
            }
        }
        let mut failed = failed.into_iter();
        let Some(first) = failed.next() else { return (taken, None) };
        let mut notes: Vec<_> = failed.map(|error| error.to_string()).collect();
        let names: Vec<_> = taken.iter().map(|one| format!("pool {}", shown(&one.pool))).collect();
        if !names.is_empty() {
            notes.push(format!("taken over: {}; repeat it to go on", names.join(", ")));
        }
        let error = notes.iter().fold(first, |error, note| error.with_note(note));
        (taken, Some(error))
    }

    fn take_one(&self, config: &PoolConfig) -> Result<Taken, Error> {
        let node = self.config.node.id.map_or(0, NodeId::number);
        let opener = Opener { node, ..Opener::default() };
        let from = self.leave.node.number;
        recover(config, self.config.runtime_dir, opener, from, self.leave.accept_loss)
    }

    fn remember(&mut self, taken: &[Taken]) -> Result<(), Error> {
        let node = self.leave.node;
        let earlier = self.record().cloned();
        self.dead.retain(|one| !one.name().is_some_and(|name| name.is(&node)));
        let mut pools = earlier.map(|record| record.pools).unwrap_or_default();
        pools.extend(taken.iter().map(|one| one.pool.clone()));
        pools.sort();
        pools.dedup();
        self.dead.push(DeadNode { node: node.to_string(), dead_unix_ms: wall_ms(), pools });
        file(self.config.state_dir).write(self.dead.clone())
    }
}

/// Recovers a pool that another node has not closed, and closes it as its opener. Blocks.
pub(super) fn recover(
    config: &PoolConfig,
    runtime_dir: &Path,
    opener: Opener,
    from: u32,
    accept_loss: bool,
) -> Result<Taken, Error> {
    let failed = |error| refused(&config.name, error);
    let mut spec = opener.spec(config, runtime_dir);
    spec.taken_from = Some(from);
    spec.accept_loss |= accept_loss;
    spec.lock_wait = LOCK_WAIT;
    let (handle, report) = pool::open(&spec).map_err(failed)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|source| Error::io("starting", source))?;
    runtime.block_on(handle.close()).map_err(failed)?;
    let (log_changes, ring_changes) = (report.log_changes, report.ring_changes);
    Ok(Taken { pool: config.name.clone(), log_changes, ring_changes })
}

/// Scripts to be run, and how long each may take.
struct NodeHooks {
    folder: PathBuf,
    limit: Duration,
}

/// The pools of the configuration, and those that were made at run time.
fn pools(config: HostConfig<'_>) -> Result<Vec<PoolConfig>, Error> {
    let mut pools = config.pools.to_vec();
    let made: Vec<Remembered> = StateFile::new(config.state_dir, "pools.json").read()?;
    let made: Vec<_> = made.into_iter().map(|one| config_of(one, config.template)).collect();
    if config.has_implied_pool {
        pools.retain(|pool| !made.iter().any(|one| lies_elsewhere(one, pool)));
    }
    for one in made {
        if pools.iter().all(|other| other.name != one.name) {
            pools.push(one);
        }
    }
    let served = ServedPools::new(config.state_dir);
    pools.iter().map(|pool| served.with_added(pool)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::services::testing::NODE;

    #[test]
    fn a_node_is_named_by_its_uuid_or_its_number() {
        let [full, short] = [NODE, &NODE[..8]].map(|text| NodeName::parse(text).unwrap());
        assert!(full.is(&short) && short.is(&full));
        assert_eq!((full.to_string(), short.to_string()), (NODE.to_owned(), NODE[..8].to_owned()));
        let other = NodeName::parse(&NODE.replace("0e4a", "0e4b")).unwrap();
        assert!(!full.is(&other) && short.is(&other));
        for text in ["", "3f2b8c1", "00000000", "+f2b8c1d", "3f2b8c1d-0e4a", "web"] {
            let error = NodeName::parse(text).unwrap_err().to_string();
            assert!(error.starts_with("node is ") && error.contains("a UUID"), "{error}");
        }
    }
}
