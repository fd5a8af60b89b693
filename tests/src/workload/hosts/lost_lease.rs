//! A host loses the lease of a cell and keeps the cell's device, as when the command is killed that
//! has the lease taken over. Its daemon takes the lease again before it opens the cell. Where the
//! other host has it by then, the daemon leaves it the cell.

use anyhow::{Result, ensure};

use super::lab::Lab;
use super::rounds::Part;

/// The other host takes the lease by LVM's command alone. It has to join the locks' space first.
const TAKE: &str = "for _ in $(seq 30); do lvchange -aey vg/cell-one && break; sleep 1; done";
/// Gives it back.
const GIVE: &str = "lvchange -an vg/cell-one";
/// The device is there.
const DEVICE: &str = "dmsetup info vg-cell--one >/dev/null 2>&1";

/// Has the host with the cell lose its lease, once in each round.
///
/// # Errors
/// When the daemon opens the cell without its lease or takes it from the other host, or a write is
/// gone.
pub fn lost_lease(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    let (mut owner, mut taken) = (0, 0);
    part.each(|round, rng| {
        let stamp = round + 1;
        let other = 1 - owner;
        lab.hosts[owner].ok(&format!("attach && blocks $VOLUME write {stamp} && detach"))?;
        lab.hosts[owner].ok("lose && lacks")?;
        if rng.bool() {
            taken += 1;
            lab.hosts[other].ok(&format!("{TAKE}; holds"))?;
            lab.hosts[owner].ok("serve_again")?;
            let wait = format!("for _ in $(seq 60); do {DEVICE} || break; sleep 1; done");
            lab.hosts[owner].ok(&format!("{wait}; ! {DEVICE} && lacks"))?;
            let refused = lab.hosts[owner].run("blockd cell take vg/one")?;
            let is_held = refused.status != 0 && refused.text.contains("held by");
            ensure!(is_held, "a cell that the other host has: {}", refused.text);
            lab.hosts[other].ok(&format!("holds && {GIVE}"))?;
            lab.hosts[other].ok("blockd cell take vg/one")?;
            owner = other;
        } else {
            lab.hosts[owner].ok("serve_again")?;
            lab.hosts[owner].ok("for _ in $(seq 60); do holds && break; sleep 1; done; holds")?;
            lab.hosts[owner].ok("for _ in $(seq 30); do attach && break; sleep 1; done; detach")?;
        }
        lab.hosts[owner].ok(&format!("attach && blocks $VOLUME verify {stamp} && detach"))?;
        Ok(())
    })?;
    lab.end()?;
    Ok(format!(
        "a lease was lost {} times, and taken again before the cell was opened; in {taken} rounds \
         of this run the other host had it, and got the cell with all that was written",
        part.rounds
    ))
}
