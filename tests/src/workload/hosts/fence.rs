//! The laboratory itself: both hosts see one disk, and the array refuses the writes of a host whose
//! key was removed, and no others.

use anyhow::{Result, ensure};

use super::blocks::CONFLICT;
use super::lab::Lab;
use super::machine::Machine;
use super::rounds::Part;

/// Each host fences the other in turn.
///
/// # Errors
/// When a write of a registered host fails, or one of a fenced host does not.
pub fn fence(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    let [a, b] = &mut lab.hosts;
    let size = a.ok("blockdev --getsize64 $DISK")?;
    ensure!(b.ok("blockdev --getsize64 $DISK")? == size, "the hosts see disks of other sizes");
    lab.register()?;
    part.each(|round, _| {
        let victim = usize::from(round % 2 == 1);
        for host in &mut lab.hosts {
            host.ok("blocks $DISK once")?;
        }
        lab.hosts[victim].send("blocks $DISK on")?;
        // While the other writes.
        lab.hosts[1 - victim].ok("blocks $DISK once")?;
        lab.fence(victim)?;
        fenced(&mut lab.hosts[victim])?;
        lab.hosts[1 - victim].ok("blocks $DISK once")?;
        lab.register_anew(victim)?;
        lab.hosts[victim].ok("blocks $DISK once").map(|_| ())
    })?;
    lab.end()?;
    Ok(format!(
        "{} hosts fenced: their writes failed, their reads and the other's writes did not",
        part.rounds
    ))
}

/// The write that ran and the next one met a conflict, and a read does not.
fn fenced(victim: &mut Machine) -> Result<()> {
    let answer = victim.answer()?;
    ensure!(answer.status == 0, "the fenced host: {}", answer.text);
    let again = victim.run("blocks $DISK once")?;
    let conflict = again.text.contains(&format!("os error {CONFLICT}"));
    ensure!(again.status != 0 && conflict, "a write of a fenced host: {}", again.text);
    victim.ok("dd if=$DISK of=/dev/null bs=4096 count=1").map(|_| ())
}
