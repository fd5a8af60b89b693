//! Hosts of a volume group that are gone: their cells are taken over, and they are forgotten.
//!
//! The order is always the same (H13 of `docs/HOSTS.md`). Nothing is changed before the host was
//! seen to be silent and every script has ended well. Then the host is fenced and remembered as
//! dead, with the cells that it had. Then, cell by cell: its lease is taken, its log replayed, the
//! pool closed in order and the lease given back. A call that was interrupted is repeated, and goes
//! on behind the scripts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blockd_api::v1;
use blockd_hosts::{Cell, CellName, Holder, HostNumber, HostsError, Key, Owner};
use blockd_media::clock::wall_ms;
use blockd_media::error::{Error, shown};
use tokio::sync::mpsc::UnboundedSender;
use tonic::Status;

use super::cells::{Look, cell_name};
use super::dead_record::DeadHost;
use super::groups::Group;
use super::making::Lock;
use super::peers::Life;
use super::{Control, blocking};
use crate::hook;

/// Where the steps of a call go, as they happen. A client that has gone away misses them; none
/// waits for a client. No more than the scripts of a folder and the cells of a group.
#[derive(Clone, Debug)]
pub(super) struct Steps(UnboundedSender<Result<v1::HostStep, Status>>);

impl Steps {
    pub(super) const fn new(send: UnboundedSender<Result<v1::HostStep, Status>>) -> Self {
        Self(send)
    }

    fn send(&self, step: v1::HostStep) {
        let _ = self.0.send(Ok(step));
    }
}

/// A call about another host of a group.
struct HostCall<'a> {
    control: &'a Control,
    group: Arc<Group>,
    host: HostNumber,
    steps: &'a Steps,
    /// One call about a host at a time.
    _one: Lock,
}

/// A host as its group has it.
struct Found {
    key: Option<Key>,
    /// Cells whose leases name it.
    held: BTreeMap<CellName, Owner>,
    /// Cells whose leases can't be read: they may be its own.
    unreadable: BTreeSet<CellName>,
    /// Something names it.
    is_known: bool,
}

impl Found {
    /// Names of cells that it has or may have.
    fn cells(&self) -> BTreeSet<String> {
        self.held.keys().chain(&self.unreadable).map(ToString::to_string).collect()
    }

    /// Whether the host is in another incarnation now.
    fn is_another(&self, now: &Self) -> bool {
        let moved = |(cell, owner): (&CellName, &Owner)| {
            self.held.get(cell).is_some_and(|before| before != owner)
        };
        self.key != now.key || now.held.iter().any(moved)
    }
}

impl Control {
    /// Declares another host dead: it is fenced, and its cells are taken over and released.
    pub(super) async fn declare_host_dead(
        &self,
        asked: &v1::DeclareHostDeadRequest,
        steps: &Steps,
    ) -> Result<v1::HostEnd, Error> {
        let call = self.call_about(&asked.group, asked.host, "declared dead", steps).await?;
        let changed = call.declare(asked.force).await?;
        Ok(call.end(changed))
    }

    /// Forgets another host that was declared dead, or with `force` any.
    pub(super) async fn forget_host(
        &self,
        asked: &v1::ForgetHostRequest,
        steps: &Steps,
    ) -> Result<v1::HostEnd, Error> {
        let call = self.call_about(&asked.group, asked.host, "forgotten", steps).await?;
        let changed = call.forget(asked.force).await?;
        Ok(call.end(changed))
    }

    async fn call_about<'a>(
        &'a self,
        group: &str,
        host: u32,
        what: &str,
        steps: &'a Steps,
    ) -> Result<HostCall<'a>, Error> {
        let group = self.group(group)?;
        let number = u16::try_from(host).ok().filter(|number| (1..=2000).contains(number));
        let number = number.ok_or_else(|| Error::invalid("host", host, "from 1 to 2000"))?;
        // A host that is not registered itself can fence none.
        self.join_group(&group).await?;
        let host = HostNumber(number);
        if host == group.host() {
            let allowed = format!("another host: this one runs, and can't be {what}");
            return Err(Error::invalid("host", host, allowed));
        }
        // No cell's name begins with a slash.
        let _one = self.0.cells.lock(&format!("{}//{host}", group.name)).await;
        Ok(HostCall { control: self, group, host, steps, _one })
    }

    /// Hosts of all groups that were declared dead here and have not come back, as nodes.
    pub(super) async fn dead_host_nodes(&self) -> Vec<v1::Node> {
        let mut groups = self.0.groups.all();
        groups.retain(|group| !group.member().dead().is_empty());
        let mut nodes = Vec::new();
        for group in self.describe_these(groups, &Look::All).await {
            for dead in group.dead {
                nodes.push(v1::Node {
                    id: format!("{}/{}", group.name, dead.host),
                    state: v1::NodeState::Dead.into(),
                    pools: dead.cells,
                    dead_unix_ms: dead.dead_unix_ms,
                });
            }
        }
        nodes
    }
}

impl HostCall<'_> {
    /// GROUP/NUMBER.
    fn name(&self) -> String {
        format!("{}/{}", self.group.name, self.host)
    }

    fn refused(&self, problem: impl Into<String>) -> Error {
        Error::in_use(format!("host {}", shown(self.name())), problem)
    }

    fn record(&self) -> Option<DeadHost> {
        self.group.member().dead().get(self.host).cloned()
    }

    fn end(&self, changed: bool) -> v1::HostEnd {
        let host = u32::from(self.host.0);
        let dead = self.group.member().dead().describe().into_iter().find(|dead| dead.host == host);
        v1::HostEnd { changed, dead }
    }

    /// Changes the record of a host that was declared dead.
    async fn note(&self, change: impl FnOnce(&mut DeadHost) + Send + 'static) -> Result<(), Error> {
        let host = self.host;
        let noted = self.control.note_in_group(&self.group, move |member| {
            if let Some(dead) = member.dead_mut().get_mut(host) {
                change(dead);
            }
        });
        noted.await
    }

    /// Looks the host up. A record of one that has come back ends.
    async fn look(&self) -> Result<Found, Error> {
        let host = self.host;
        let before = self.group.member().dead().clone();
        let found = self.control.coordinate(&self.group, move |leases| {
            let key = leases.keys()?.into_iter().find(|key| key.host() == host);
            let (mut held, mut unreadable) = (BTreeMap::new(), BTreeSet::new());
            for cell in leases.cells()? {
                match cell.holder {
                    Holder::Other(owner) if owner.host == host => {
                        held.insert(cell.name, owner);
                    }
                    Holder::Unknown(_) => {
                        unreadable.insert(cell.name);
                    }
                    Holder::This | Holder::Free | Holder::Other(_) => {}
                }
            }
            let has_address = leases.address_of(host)?.is_some();
            let is_known = key.is_some() || !held.is_empty() || has_address;
            Ok(Found { key, held, unreadable, is_known })
        });
        let found = found.await?;
        self.control.note_returned(&self.group, before, found.key.as_slice()).await;
        Ok(found)
    }

    /// False where the host was dead already, and nothing was left to do.
    async fn declare(&self, force: bool) -> Result<bool, Error> {
        let found = self.look().await?;
        let key = match self.record() {
            Some(dead) if dead.pending.is_empty() && found.held.is_empty() => return Ok(false),
            Some(dead) => {
                let cells = found.cells();
                self.note(move |dead| dead.pending.extend(cells)).await?;
                dead.key()
            }
            None if !found.is_known => return Err(Error::not_found("host", &self.name())),
            None => self.fence(found, force).await?,
        };
        self.take_over(key).await?;
        Ok(true)
    }

    /// Fences the host and remembers it as dead, with the cells that it has. Gives its key.
    async fn fence(&self, found: Found, force: bool) -> Result<Option<Key>, Error> {
        if !force {
            self.refuse_alive().await?;
        }
        self.run_hooks("pre-declare-dead.d", found.cells()).await?;
        // Scripts may take long, and the host may have come back since it was looked up.
        let now = self.look().await?;
        if found.is_another(&now) {
            return Err(HostsError::CameBack { host: self.host }.into());
        }
        if !force {
            self.refuse_alive().await?;
        }
        if let Some(key) = now.key {
            self.control.fence_host(&self.group, key).await?;
        } else if !now.held.is_empty() {
            // Without a key there is no fence.
            self.control.key_of(&self.group, self.host).await?;
        }
        let (host, dead) = (self.host, DeadHost::new(now.key, wall_ms(), now.cells()));
        let noted = move |member: &mut super::groups::Membership| {
            member.dead_mut().insert(host, dead);
        };
        self.control.note_in_group(&self.group, noted).await?;
        tracing::info!(group = self.group.name, %host, "host declared dead");
        Ok(now.key)
    }

    /// Refuses a host that may be alive.
    async fn refuse_alive(&self) -> Result<(), Error> {
        match self.control.life_of(&self.group, self.host).await? {
            Life::Silent => Ok(()),
            Life::Answers(place) => {
                let problem =
                    format!("answers: {place}; stop it there, or use --force to fence it alive");
                Err(self.refused(problem))
            }
            Life::NotKnown(why) => {
                let problem = format!(
                    "may be alive: {why}; see that it is off, then use --force to fence it"
                );
                Err(self.refused(problem))
            }
        }
    }

    async fn run_hooks(&self, folder: &str, cells: BTreeSet<String>) -> Result<(), Error> {
        let options = &self.control.0.options;
        let (folder, limit) = (options.hooks_dir.join(folder), options.hook_timeout);
        let (name, steps) = (self.name(), self.steps.clone());
        let ran = blocking(move || {
            // A name has no line feed.
            let cells = cells.into_iter().collect::<Vec<_>>().join("\n");
            let variables = [("BLOCKD_NODE", name.as_str()), ("BLOCKD_POOLS", cells.as_str())];
            let mut report = |ran: &hook::Ran| {
                let hook = v1::HookRun {
                    path: ran.path.display().to_string(),
                    output: ran.output.clone(),
                    took_ms: u64::try_from(ran.took.as_millis()).unwrap_or(u64::MAX),
                };
                steps.send(v1::HostStep { hook: Some(hook), ..Default::default() });
            };
            Ok(hook::run_all(&folder, &[&name], &variables, limit, &mut report))
        });
        ran.await?.map_err(|error| self.refused(format!("stays as it is: {error}")))
    }

    /// Takes the cells of a host that was fenced over, one by one. One that fails does not hold the
    /// others up.
    async fn take_over(&self, key: Option<Key>) -> Result<(), Error> {
        // Its record ends when it comes back.
        let dead = self.record().ok_or(HostsError::CameBack { host: self.host })?;
        let pending = dead.pending;
        let count = pending.len();
        let mut failures = Vec::new();
        for cell in pending {
            let taken = match self.take_over_cell(&cell, key).await {
                Ok(taken) => self.finish(&cell, taken.outcome()).await.map(|()| taken),
                Err(error) => Err(error),
            };
            let step = taken.unwrap_or_else(|error| {
                let failure = error.to_string();
                failures.push(failure.clone());
                let outcome = v1::HostCellOutcome::Failed.into();
                v1::HostCell { name: cell, outcome, failure, log_changes: 0 }
            });
            self.steps.send(v1::HostStep { cell: Some(step), ..Default::default() });
        }
        if failures.is_empty() {
            return Ok(());
        }
        let problem = format!(
            "was fenced, and {} of its {count} cell(s) could not be taken over, repeat it to go \
             on: {}",
            failures.len(),
            failures.join("; ")
        );
        Err(self.refused(problem))
    }

    async fn finish(&self, cell: &str, outcome: v1::HostCellOutcome) -> Result<(), Error> {
        let is_taken = matches!(outcome, v1::HostCellOutcome::Released | v1::HostCellOutcome::Kept);
        let cell = cell.to_owned();
        self.note(move |dead| dead.finish(&cell, is_taken)).await
    }

    /// Takes one cell over, closes it in order and releases it. One that volumes of this host wait
    /// for stays open here, as does one that was open here before, and one that another host has by
    /// now is left alone.
    async fn take_over_cell(&self, cell: &str, key: Option<Key>) -> Result<v1::HostCell, Error> {
        let (control, group) = (self.control, &self.group);
        let done = |outcome: v1::HostCellOutcome, log_changes| v1::HostCell {
            name: cell.to_owned(),
            outcome: outcome.into(),
            failure: String::new(),
            log_changes,
        };
        let name = cell_name(cell)?;
        let Some(found) = control.find_cell(group, &name).await? else {
            return Ok(done(v1::HostCellOutcome::Elsewhere, 0));
        };
        match &found.holder {
            Holder::Unknown(problem) => {
                return Err(HostsError::NotKnown { cell: name, problem: problem.clone() }.into());
            }
            Holder::Other(owner) if ![self.host, group.host()].contains(&owner.host) => {
                return Ok(done(v1::HostCellOutcome::Elsewhere, 0));
            }
            Holder::This | Holder::Free | Holder::Other(_) => {}
        }
        if found.is_new {
            self.free_new_cell(&name, key).await?;
            return Ok(done(v1::HostCellOutcome::Released, 0));
        }
        let Some((log_changes, is_opened)) = self.open_cell(&found, key).await? else {
            return Ok(done(v1::HostCellOutcome::Released, 0));
        };
        // One that was taken here since an earlier call may be used without an attachment.
        if !is_opened || !control.0.attachments.of_pool(cell).is_empty() {
            return Ok(done(v1::HostCellOutcome::Kept, log_changes));
        }
        let (group, name) = (group.name.clone(), cell.to_owned());
        let release = v1::ReleaseCellRequest { group, name, force: false };
        control.release_cell(release).await?;
        Ok(done(v1::HostCellOutcome::Released, log_changes))
    }

    /// Opens a cell, and notes that before, so that the next call closes it if this one is
    /// interrupted. Gives the changes that were replayed, and whether this takeover has opened it;
    /// `None` where it has no pool.
    async fn open_cell(
        &self,
        found: &Cell,
        key: Option<Key>,
    ) -> Result<Option<(u64, bool)>, Error> {
        let (control, cell) = (self.control, found.name.to_string());
        let was_opened = self.record().is_some_and(|dead| dead.is_opening(&cell));
        let note = async |is_opening| {
            let cell = cell.clone();
            self.note(move |dead| dead.set_opening(&cell, is_opening)).await
        };
        if found.holder != Holder::This || !control.is_open(found) {
            note(true).await?;
        }
        let taking = v1::TakeCellRequest {
            group: self.group.name.clone(),
            name: cell.clone(),
            fence: true,
            only_from: u32::from(self.host.0),
            ..Default::default()
        };
        match control.take_cell_after(taking, key).await {
            Ok(taken) => Ok(taken.map(|taken| (taken.log_changes, taken.changed || was_opened))),
            Err(error) => {
                // A call that takes it before the next takeover opens it for itself.
                if !control.is_open(found) {
                    note(false).await?;
                }
                Err(error)
            }
        }
    }

    /// Frees a cell whose making was not finished. Without a pool there is nothing to recover, and
    /// `blockd cell create` makes it anew.
    async fn free_new_cell(&self, name: &CellName, key: Option<Key>) -> Result<(), Error> {
        let (control, group) = (self.control, &self.group);
        let _one = control.lock_cell(group, name).await;
        let seen = control.look_at_cell(group, name).await?.filter(|seen| seen.cell.is_new);
        let Some(seen) = seen else { return Ok(()) };
        match seen.cell.holder {
            Holder::Other(owner) if owner.host == self.host => {
                control.take_from(group, &seen, owner, key).await?;
            }
            // An earlier call was interrupted behind the lease.
            Holder::This | Holder::Free => {}
            Holder::Other(_) | Holder::Unknown(_) => return Ok(()),
        }
        control.give_back(group, name).await
    }

    /// False where nothing names the host.
    async fn forget(&self, force: bool) -> Result<bool, Error> {
        let found = self.look().await?;
        let dead = self.record();
        if dead.is_none() && !found.is_known {
            return Ok(false);
        }
        let has_cells =
            !found.held.is_empty() || dead.as_ref().is_some_and(|dead| !dead.pending.is_empty());
        if (dead.is_none() || has_cells) && !force {
            let name = shown(self.name());
            let why = match dead {
                None => "was not declared dead, or has come back since",
                Some(_) => "has cells that were not taken over",
            };
            let problem = format!("{why}: `blockd node declare-dead {name}` first, or use --force");
            return Err(self.refused(problem));
        }
        self.run_hooks("pre-forget.d", found.cells()).await?;
        // It may have come back, or have been taken over, since it was looked up.
        let now = self.look().await?;
        if found.is_another(&now) {
            return Err(HostsError::CameBack { host: self.host }.into());
        }
        if force {
            self.declare(true).await?;
        }
        let dead = self.record().ok_or(HostsError::CameBack { host: self.host })?;
        if let Some(key) = dead.key() {
            self.control.fence_host(&self.group, key).await?;
        }
        let (host, key) = (self.host, now.key);
        if key != dead.key() && key.is_some() {
            return Err(HostsError::CameBack { host }.into());
        }
        self.control.coordinate(&self.group, move |leases| leases.forget_host(host, key)).await?;
        let noted = move |member: &mut super::groups::Membership| member.forget_host(host);
        self.control.note_in_group(&self.group, noted).await?;
        tracing::info!(group = self.group.name, %host, "host forgotten");
        Ok(true)
    }
}
