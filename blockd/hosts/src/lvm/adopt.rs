//! Leases that outlive the lock manager. When lvmlockd dies, sanlock keeps the group's lockspace
//! and the leases of its logical volumes as orphans. With `--adopt 1` the next lvmlockd takes them
//! over itself; otherwise `--lockopt adopt` of LVM's commands has it do so (lvmlockd(8)).

use super::command::Refusal;
use super::{Lvm, cell_name, lease, report};

impl Lvm {
    /// Runs a command that takes locks. Where they are refused because lvmlockd was started anew,
    /// it gets what the former one has left, and the command is run again.
    pub(super) fn run(&self, name: &str, words: &[&str]) -> Result<String, Refusal> {
        self.again(|| self.commands.run(name, words))
    }

    /// The same for anything that locks can refuse.
    pub(super) fn again<T>(&self, run: impl Fn() -> Result<T, Refusal>) -> Result<T, Refusal> {
        match run() {
            Err(refusal) if refusal.is_of_locks() && self.adopt() => run(),
            ended => ended,
        }
    }

    /// Has lvmlockd take over the leases that are orphans. LVM deactivates a logical volume whose
    /// lease is one, and leaves the lease: no other host could have it.
    pub(super) fn adopt_orphans(&self) {
        let status = self.commands.run("sanlock", &["client", "status"]);
        if status.is_ok_and(|text| !lease::orphans(&text, &self.name).is_empty()) {
            self.adopt();
        }
    }

    /// Gives lvmlockd the lockspace and the leases that sanlock has kept. False if it can't have
    /// them, or there are none: whether this host is to join the group is not decided here.
    fn adopt(&self) -> bool {
        let Ok(status) = self.commands.run("sanlock", &["client", "status"]) else { return false };
        if lease::own_number(&status, &self.name).is_none() {
            return false;
        }
        let started = ["--lockstart", "--lockopt", "adopt", &self.name];
        if self.commands.run("vgchange", &started).is_err() {
            return false;
        }
        let orphans = lease::orphans(&status, &self.name);
        let volumes = self.volumes_report().ok().and_then(|text| report::volumes(&text).ok());
        let Some(volumes) = volumes else { return false };
        let cells = volumes.iter().filter(|volume| cell_name(&volume.name).is_some());
        for cell in cells.filter(|cell| orphans.contains(&cell.uuid.as_str())) {
            let path = format!("{}/{}", self.name, cell.name);
            let words = ["-aey", "--lockopt", "adopt", &path];
            if let Err(refusal) = self.commands.run("lvchange", &words) {
                let error = self.group_error(refusal);
                tracing::warn!(cell = cell.name, %error, "lvmlockd does not take over a lease");
                return false;
            }
            // A lease without a device here is of no use, and keeps other hosts out.
            if !cell.is_active && self.commands.run("lvchange", &["-an", &path]).is_err() {
                return false;
            }
            tracing::info!(cell = cell.name, "lvmlockd was started anew, and has its lease again");
        }
        true
    }
}
