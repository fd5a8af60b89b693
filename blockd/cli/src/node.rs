//! `blockd node`.

use std::path::PathBuf;

use blockd_api::v1::{self, ListNodesRequest, NodeObjectKind, NodeStatusRequest};
use blockd_media::clock::wall_ms;
use blockd_media::error::Error;
use serde::Serialize;

use super::answers::date;
use super::output::table::{Side, Table, properties};
use super::program::{HookRun, NodeRemoval, Removal};
use super::{Context, amount};

/// List hosts, show what is waited for, declare a host dead or forget it
///
/// A node is a host as a member of pools. Its UUID is made from the host's /etc/machine-id, or is
/// the configuration's node.id. (`blockd vg` and `blockd cell` are for disks that several hosts
/// share.)
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  blockd node status")]
pub(crate) enum Node {
    List(List),
    Status(Status),
    DeclareDead(DeclareDead),
    Forget(Forget),
    Lost(Lost),
}

/// List the nodes that are known here
///
/// This one; those that were declared dead here and not forgotten; and those that have left a pool
/// of this daemon without closing it, for which the daemon refuses to open it. Hosts of volume
/// groups are listed as GROUP/NUMBER once they were declared dead, until they come back.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd node list")]
pub(crate) struct List {}

/// Show what this node has of its pools, and what is waited for
///
/// Of each pool: the node's objects, which have names of their own and are no volumes; requests
/// that are parked; and the data paths outside that wait for space, with the time since they do,
/// the first first.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd node status\n  blockd node status default")]
pub(crate) struct Status {
    /// Only this pool
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// Take over what another host has left in pools of this one, or its cells
///
/// For a host that is gone, and is known not to come back by itself. The scripts in
/// hooks/pre-declare-dead.d beside the configuration run in the order of their names before
/// anything is changed, with the host's name as argument: the place to switch the host off. One
/// that fails, can't be run or takes longer than node.hook_timeout ends it all.
///
/// UUID: each pool that the host has not closed is recovered from its log and closed, so that this
/// host may open it. Needs no daemon, and none may have the pools. The owner lock has to be free.
///
/// GROUP/NUMBER: a host of a volume group (`blockd vg`), through the daemon. Refused while the host
/// answers at its published address. Its key is removed from the disks of the group, which keeps it
/// from all cells. Then each of its cells is taken, recovered from its log, closed and released.
/// One that fails does not hold the others up: repeat it to go on. Once the host has booted and
/// joined again, it is not dead any more.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd node declare-dead 3f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f\n  \
                  blockd node declare-dead san/2"
)]
pub(crate) struct DeclareDead {
    #[command(flatten)]
    pub which: Which,

    /// GROUP/NUMBER: also a host that answers, or of which that can't be found out
    #[arg(long)]
    pub force: bool,
}

/// Forget a host that was declared dead
///
/// No pool names it any more, and it is no longer listed. Of GROUP/NUMBER the key and the address
/// are removed from the volume group. The scripts in hooks/pre-forget.d run before, as with
/// declare-dead. A host that was not declared dead, or has opened a pool or joined again since, is
/// refused unless it is forced, and then taken over from like a dead one. So is one that a pool may
/// name that can't be read; forced, that pool is left out. The host that this runs on is never
/// forgotten.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd node forget 3f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f\n  \
                  blockd node forget san/2")]
pub(crate) struct Forget {
    #[command(flatten)]
    pub which: Which,

    /// Also one that was not declared dead, or that a pool may name that can't be read
    #[arg(long)]
    pub force: bool,
}

/// Drop all cells of a volume group whose membership this host has lost
///
/// For LVM to run when sanlock can't renew this host's lease: lvmlockctl_kill_command =
/// "/usr/bin/blockd node lost" in lvm.conf. The cells' pools stop without another write, and their
/// devices become ones that refuse all IO; then lvmlockd is allowed to drop the group's locks.
/// Where this fails, the watchdog of sanlock resets the host. Needs no daemon for the devices.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd node lost san")]
pub(crate) struct Lost {
    /// The volume group
    pub group: String,
}

/// Which node, and where its pools are looked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Which {
    /// Its UUID, or the first eight digits; or GROUP/NUMBER for a host of a volume group
    pub node: String,

    /// UUID: configuration (TOML) [default: /etc/blockd/blockd.toml, or in ~/.config, if it is
    /// there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// UUID: go on without its delta ring: answered writes that were not flushed are lost
    #[arg(long)]
    pub accept_loss: bool,
}

/// The output of `node list --json`.
#[derive(Debug, Serialize)]
struct Listed {
    nodes: Vec<v1::Node>,
}

/// The output of `node status --json`.
#[derive(Debug, Serialize)]
struct StatusShape {
    node: v1::Node,
    pools: Vec<v1::NodePool>,
}

/// The output of `node declare-dead --json` and `node forget --json`.
#[derive(Debug, Serialize)]
struct LeftShape {
    changed: bool,
    node: String,
    hooks: Vec<HookShape>,
    pools: Vec<TakenShape>,
    /// Pools that can't be read, and may name it.
    unread: Vec<UnreadShape>,
}

#[derive(Debug, Serialize)]
struct UnreadShape {
    pool: String,
    problem: String,
}

#[derive(Debug, Serialize)]
struct HookShape {
    path: String,
    output: String,
    took_ms: u64,
}

#[derive(Debug, Serialize)]
struct TakenShape {
    pool: String,
    log_changes: u64,
    ring_changes: u64,
}

impl Node {
    /// Whether it works on the devices, with no daemon.
    pub(super) fn is_offline(&self) -> bool {
        match self {
            Self::DeclareDead(DeclareDead { which, .. }) | Self::Forget(Forget { which, .. }) => {
                !which.node.contains('/')
            }
            Self::List(_) | Self::Status(_) | Self::Lost(_) => false,
        }
    }

    /// Runs what works with no daemon.
    pub(super) fn run_offline(&self, context: &Context) -> Result<(), Error> {
        match self {
            Self::DeclareDead(dead) => {
                if dead.force {
                    let allowed = "left out: it is for GROUP/NUMBER";
                    return Err(Error::invalid("force", "true", allowed));
                }
                dead.which.remove(context, "declared dead", Removal::DeclareDead)
            }
            Self::Forget(one) => {
                one.which.remove(context, "forgotten", Removal::Forget { force: one.force })
            }
            Self::List(_) | Self::Status(_) | Self::Lost(_) => Ok(()),
        }
    }

    /// Runs what speaks to the daemon.
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        match self {
            Self::List(_) => list(context).await,
            Self::Status(status) => status.run(context).await,
            // They have been dealt with.
            Self::DeclareDead(_) | Self::Forget(_) | Self::Lost(_) => Ok(()),
        }
    }
}

impl Which {
    /// The name of a host of a volume group. The daemon has its own configuration, and a cell no
    /// delta ring on other hosts.
    pub(super) fn host(&self) -> Result<&str, Error> {
        let allowed = "left out with GROUP/NUMBER";
        if let Some(config) = &self.config {
            return Err(Error::invalid("config", config.display(), allowed));
        }
        if self.accept_loss {
            return Err(Error::invalid("accept-loss", "true", allowed));
        }
        Ok(&self.node)
    }

    fn remove(&self, context: &Context, what: &str, how: Removal) -> Result<(), Error> {
        let mut hooks: Vec<HookShape> = Vec::new();
        let mut report = |ran: HookRun<'_>| {
            if !context.output.is_json() {
                // As it happens: the steps after it may take long, or fail.
                let lines = ran.output.lines().map(|line| format!("  {line}\n"));
                let text = format!("{}: done\n{}", ran.path.display(), lines.collect::<String>());
                let _ = context.output.text(&text);
            }
            hooks.push(HookShape {
                path: ran.path.display().to_string(),
                output: ran.output.to_owned(),
                took_ms: u64::try_from(ran.took.as_millis()).unwrap_or(u64::MAX),
            });
        };
        let removal = NodeRemoval {
            node: &self.node,
            config: self.config.as_deref(),
            accept_loss: self.accept_loss,
            how,
        };
        let left = context.program.remove_node(&removal, &mut report)?;
        let pools = left.pools.into_iter().map(|one| TakenShape {
            pool: one.pool,
            log_changes: one.log_changes,
            ring_changes: one.ring_changes,
        });
        let (node, changed, pools) = (left.node, left.changed, pools.collect());
        let unread = left.unread.into_iter();
        let unread: Vec<_> =
            unread.map(|one| UnreadShape { pool: one.pool, problem: one.problem }).collect();
        for UnreadShape { pool, problem } in &unread {
            eprintln!("pool {pool} can't be read, and was left out: {problem}");
        }
        let shape = LeftShape { changed, node: node.clone(), hooks, pools, unread };
        context.output.either(&shape, || {
            let how = if changed { what.to_owned() } else { format!("was {what} already") };
            let mut text = format!("node {node}: {how}\n");
            for TakenShape { pool, log_changes, ring_changes } in &shape.pools {
                text.push_str(&format!(
                    "pool {pool}: taken over, {log_changes} change(s) replayed from its log, \
                     {ring_changes} from its delta ring\n"
                ));
            }
            text
        })
    }
}

async fn list(context: &Context) -> Result<(), Error> {
    let nodes = context.client().await?.list_nodes(ListNodesRequest {}).await?.nodes;
    let listed = Listed { nodes };
    context.output.either(&listed, || {
        let columns = [
            ("node", Side::Left),
            ("state", Side::Left),
            ("since", Side::Left),
            ("pools", Side::Left),
        ];
        let mut table = Table::new(&columns);
        for node in &listed.nodes {
            let since = match node.dead_unix_ms {
                0 => String::new(),
                dead => date(dead),
            };
            let state = node.state().word();
            table.row([id(node).into(), state.into(), since.into(), node.pools.join(" ").into()]);
        }
        table.render(context.output.terminal())
    })
}

impl Status {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let request = NodeStatusRequest { pool: self.pool };
        let answer = context.client().await?.node_status(request).await?;
        let node = answer.node.unwrap_or_default();
        let status = StatusShape { node, pools: answer.pools };
        context.output.either(&status, || {
            let mut text = format!("node {}\n", id(&status.node));
            for pool in &status.pools {
                text.push('\n');
                text.push_str(&details(pool, context));
            }
            text
        })
    }
}

fn id(node: &v1::Node) -> &str {
    if node.id.is_empty() { "no identity" } else { &node.id }
}

fn details(pool: &v1::NodePool, context: &Context) -> String {
    let output = &context.output;
    let mut rows = vec![("pool", pool.name.clone()), ("state", pool.state().word().to_owned())];
    if !pool.failure.is_empty() {
        rows.push(("failure", pool.failure.clone()));
    } else {
        rows.push(("epoch", pool.epoch.to_string()));
        rows.extend(pool.objects.iter().map(|one| object_row(one, context)));
        rows.push(("free", output.size(amount(pool.free_bytes))));
        rows.push(("parked", pool.parked.to_string()));
    }
    if pool.blocked_since_unix_ms != 0 {
        let since = since(pool.blocked_since_unix_ms);
        rows.push(("waiting", format!("{} write(s) for space, {since}", pool.blocked_writes)));
    }
    for one in &pool.waiting {
        let (room, since) = (output.size(amount(one.room_bytes)), since(one.since_unix_ms));
        let (volume, peer) = (&one.volume, &one.peer);
        rows.push(("waiting", format!("{volume} for up to {room}, {since}, {peer}")));
    }
    properties(&rows, output.paint())
}

/// How long something has been so.
fn since(unix_ms: i64) -> String {
    let seconds = wall_ms().saturating_sub(unix_ms).max(0) / 1000;
    format!("since {} ({seconds} s)", date(unix_ms))
}

/// An object of a node in a line of a list.
pub(super) fn object_row(object: &v1::NodeObject, context: &Context) -> (&'static str, String) {
    let size = |bytes: i64| context.output.size(amount(bytes));
    let total = size(object.total_bytes);
    let text = match object.kind() {
        NodeObjectKind::Journal => {
            format!("{}: {} of {total}", object.name, size(object.used_bytes))
        }
        NodeObjectKind::Free | NodeObjectKind::Unspecified => format!("{}: {total}", object.name),
    };
    ("of this node", text)
}
