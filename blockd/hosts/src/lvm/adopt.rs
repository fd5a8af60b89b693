//! Leases that outlive the lock manager. When lvmlockd dies, sanlock keeps the group's lockspace
//! and the leases of its logical volumes as orphans. With `--adopt 1` the next lvmlockd takes them
//! over itself (lvmlockd(8)); otherwise `--lockopt adopt` of LVM's commands has it do so. That
//! means: take over an orphan of this host, or else take the lock as usual.

use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_media::clock::boot_ns;

use crate::cell::{CellName, HostNumber};
use crate::error::HostsError;

use super::command::Refusal;
use super::{Lvm, VOLUME_FIELDS, lease, report, volume_name};

/// Has LVM's command take over the locks that it needs.
const ADOPT: [&str; 2] = ["--lockopt", "adopt"];
/// The lease of the group itself, in sanlock's names.
const GROUP_LEASE: &str = "VGLK";
/// Of a change that changes nothing: no group has it.
const NO_TAG: &str = "blockd.none";

/// For how long a lease counts from the look at its record on the disk: the least time for which a
/// host that opens a cell in a takeover holds its claim page before it can close it again, so that
/// a page which is free that soon was not left by one that has overwritten the lease meanwhile and
/// opened the cell.
const COUNTS_FOR: Duration = Duration::from_secs(2);

/// Whether this host has a lease, by sanlock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Looked {
    /// Sanlock does not answer, or there is nothing to ask for.
    Unknown,
    /// This host does not have it.
    Lost,
    /// This host has it, and no other one gets it for so long.
    Held(Duration),
}

impl Lvm {
    /// Runs a command about the group that takes locks. Where they are refused because lvmlockd was
    /// started anew, it gets what the former one has left, and the command is run again.
    pub(super) fn run(&self, name: &str, words: &[&str]) -> Result<String, Refusal> {
        self.again(|| self.commands.run(name, words), || self.rejoin())
    }

    /// The same for a command that needs the lease of a cell.
    pub(super) fn run_on(
        &self,
        cell: &CellName,
        name: &str,
        words: &[&str],
    ) -> Result<String, Refusal> {
        self.again(|| self.commands.run(name, words), || self.rejoin() && self.adopt(cell))
    }

    /// The same for a report of logical volumes.
    pub(super) fn report(&self, words: &[&str]) -> Result<String, Refusal> {
        self.again(|| self.commands.run_locked("lvs", words), || self.rejoin())
    }

    fn again(
        &self,
        run: impl Fn() -> Result<String, Refusal>,
        mend: impl Fn() -> bool,
    ) -> Result<String, Refusal> {
        match run() {
            Err(refusal) if refusal.is_of_locks() && mend() => run(),
            ended => ended,
        }
    }

    /// Gives lvmlockd the lockspace that sanlock has kept, and the lock of the group, if the former
    /// one has died with it. False if it can't have them: whether this host is to join the group is
    /// not decided here.
    fn rejoin(&self) -> bool {
        let Some(status) = self.status() else { return false };
        if self.is_cut_off.load(Ordering::Acquire) || !lease::is_joined(&status, &self.name) {
            return false;
        }
        let words = [&["--lockstart"], &ADOPT[..], &[&self.name]].concat();
        if self.commands.run("vgchange", &words).is_err() {
            return false;
        }
        if !lease::is_orphan(&status, &self.name, GROUP_LEASE) {
            return true;
        }
        // A report takes over a lock that is shared with others, a change one that is not.
        let words = [&["--yes", "--deltag", NO_TAG], &ADOPT[..], &[&self.name]].concat();
        let report = [&ADOPT[..], &report::words(VOLUME_FIELDS, &self.name)].concat();
        self.commands.run_locked("lvs", &report).is_ok()
            || self.commands.run("vgchange", &words).is_ok()
    }

    /// Has lvmlockd take over the lease of a cell, if it is an orphan. False if it can't.
    fn adopt(&self, cell: &CellName) -> bool {
        let _one = self.adopting.lock();
        let found = self.orphan(cell);
        let Ok(Some(is_active)) = found else { return found.is_ok() };
        let path = self.path(cell);
        let words = [&["-aey"], &ADOPT[..], &[&path]].concat();
        let Err(refusal) = self.commands.run("lvchange", &words) else {
            tracing::info!(%cell, "lvmlockd was started anew, and has a lease again");
            return true;
        };
        let error = self.group_error(refusal);
        tracing::warn!(%cell, %error, "lvmlockd does not take over a lease");
        // It may have it all the same, or give it back because the command has ended too early.
        let word = if is_active { "-aey" } else { "-an" };
        self.commands.run("lvchange", &[word, &path]).is_ok() && is_active
    }

    /// Ends the use of a cell's logical volume, and its lease with it. LVM leaves a lease that is
    /// an orphan, and no other host could have it.
    pub(super) fn deactivate(&self, cell: &CellName) -> Result<(), HostsError> {
        if self.status().is_some_and(|status| lease::has_orphans(&status, &self.name))
            && self.rejoin()
        {
            self.adopt(cell);
        }
        {
            let _one = self.adopting.lock();
            let ended = self.run("lvchange", &["-an", &self.path(cell)]);
            ended.map_err(|refusal| self.cell_error(refusal, cell))?;
        }
        match self.orphan(cell)? {
            None => Ok(()),
            Some(_) => {
                Err(self.away(format!("lvmlockd has not given back the lease of cell {cell}")))
            }
        }
    }

    /// Makes sure that this host has the lease of a cell whose device is there. lvmlockd gives a
    /// lease back, and the device stays, if the command that has it taken over is killed: then it
    /// is taken again. Where another host has it, the device goes.
    /// Gives for how long no other host gets it; zero where that is not known.
    pub(super) fn confirm_lease(&self, cell: &CellName) -> Result<Duration, HostsError> {
        match self.look_for_lease(cell) {
            Looked::Held(left) => return Ok(left),
            Looked::Unknown => return Ok(Duration::ZERO),
            Looked::Lost => {}
        }
        let _one = self.adopting.lock();
        // Another call may have taken it meanwhile.
        if self.look_for_lease(cell) == Looked::Lost {
            self.take_again(cell)?;
            tracing::warn!(%cell, "the lease of a cell was lost, and is taken again");
        }
        Ok(Duration::ZERO)
    }

    /// Looks whether this host has the lease of a cell whose device is there.
    fn look_for_lease(&self, cell: &CellName) -> Looked {
        let words = ["info", "--columns", "--noheadings", "-o", "uuid", &self.device_name(cell)];
        let asked_ns = boot_ns();
        // Without a device there is nothing to be opened.
        let Ok(id) = self.commands.run("dmsetup", &words) else { return Looked::Unknown };
        let Ok(status) = self.commands.run("sanlock", &["client", "status", "-D"]) else {
            tracing::warn!(%cell, "sanlock can't be asked whether the lease is held");
            return Looked::Unknown;
        };
        let device = id.trim();
        if !lease::is_here(&status, &self.name, device) {
            return Looked::Lost;
        }
        let Some(resource) = lease::alone(&status, &self.name, device) else {
            return Looked::Held(Duration::ZERO);
        };
        let looked = Duration::from_nanos(boot_ns().saturating_sub(asked_ns));
        let left = lease::time_left(&status, &self.name).min(looked + COUNTS_FOR);
        match (self.named_host(resource), lease::own_number(&status, &self.name)) {
            (Some(leader), Some(own)) if leader == own => Looked::Held(left),
            (Some(_), Some(_)) => Looked::Lost,
            _ => Looked::Held(Duration::ZERO),
        }
    }

    /// The host that a lease on the disk names. Sanlock does not look again at one that it has, and
    /// another host may have overwritten it in a takeover.
    fn named_host(&self, resource: &str) -> Option<HostNumber> {
        let leader = self.commands.run("sanlock", &["direct", "read_leader", "-r", resource]);
        let owner = leader.map(|text| lease::owner(&text));
        if !matches!(owner, Ok(Ok(_))) {
            tracing::debug!(resource, ?owner, "a lease on the disk can't be read");
        }
        owner.ok()?.ok().flatten().map(|owner| owner.host)
    }

    fn take_again(&self, cell: &CellName) -> Result<(), HostsError> {
        let owner = self.owner(&self.volume(cell)?);
        let owner =
            owner.map_err(|problem| HostsError::NotKnown { cell: cell.clone(), problem })?;
        let this = self.host()?;
        // LVM would give an expired lease, which is no fence (H3).
        if let Some(other) = owner.map(|owner| owner.host).filter(|host| *host != this) {
            // Because of its device the cell would count as this host's.
            if let Err(refusal) = self.commands.run("dmsetup", &["remove", &self.device_name(cell)])
            {
                let error = self.group_error(refusal);
                tracing::warn!(%cell, %error, "the device of another host's cell stays");
            }
            return Err(HostsError::Held { cell: cell.clone(), by: Some(other) });
        }
        let path = self.path(cell);
        let change = |word: &str| self.commands.run("lvchange", &[word, &path]);
        change("-aey").map_err(|refusal| self.cell_error(refusal, cell))?;
        // Another host may have made the cell larger meanwhile.
        let Err(refusal) = change("--refresh") else { return Ok(()) };
        // With the lease the device would be opened as it is.
        if let Err(refusal) = change("-an") {
            let error = self.group_error(refusal);
            tracing::error!(%cell, %error, "a device with its former table stays: `lvchange -an`");
        }
        Err(self.cell_error(refusal, cell))
    }

    /// Whether a cell whose lease is an orphan is active; `None` where the lease is none.
    fn orphan(&self, cell: &CellName) -> Result<Option<bool>, HostsError> {
        let status = self.status();
        let status = status.ok_or_else(|| self.away("sanlock does not answer".to_owned()))?;
        if !lease::has_orphans(&status, &self.name) {
            return Ok(None);
        }
        let volumes = self.volumes()?;
        let found = volumes.into_iter().find(|volume| volume.name == volume_name(cell));
        let found = found.filter(|one| lease::is_orphan(&status, &self.name, &one.uuid));
        Ok(found.map(|one| one.is_active))
    }

    fn away(&self, problem: String) -> HostsError {
        HostsError::Away { group: format!("volume group {}", self.name), problem }
    }

    fn status(&self) -> Option<String> {
        self.commands.run("sanlock", &["client", "status"]).ok()
    }
}
