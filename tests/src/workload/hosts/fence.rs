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
    let mut lab = Lab::start(&part.run)?;
    let [a, b] = &mut lab.hosts;
    let size = a.ok("blockdev --getsize64 $DISK")?;
    ensure!(b.ok("blockdev --getsize64 $DISK")? == size, "the hosts see disks of other sizes");
    let mut keys = [1, 2];
    a.ok("reservation register 1")?;
    b.ok("reservation register 2")?;
    a.ok("reservation reserve 1")?;
    part.each(|round, _| {
        let victim = usize::from(round % 2 == 1);
        let (lost, own) = (keys[victim], keys[1 - victim]);
        let (host, other) = if victim == 0 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
        one(host, other, &format!("reservation fence {own} {lost}"))?;
        // A fenced host comes back with a key that it did not have before.
        keys[victim] = round + 3;
        host.ok(&format!("reservation register {}", keys[victim]))?;
        host.ok("blocks $DISK once").map(|_| ())
    })?;
    lab.end()?;
    Ok(format!(
        "{} hosts fenced: their writes failed, their reads and the other's did not",
        part.rounds
    ))
}

fn one(victim: &mut Machine, other: &mut Machine, fence: &str) -> Result<()> {
    victim.ok("blocks $DISK once")?;
    other.ok("blocks $DISK once")?;
    victim.send("blocks $DISK on")?;
    // While it writes.
    other.ok("blocks $DISK once")?;
    other.ok(fence)?;
    let answer = victim.answer()?;
    ensure!(answer.status == 0, "the fenced host: {}", answer.text);
    let again = victim.run("blocks $DISK once")?;
    let conflict = again.text.contains(&format!("os error {CONFLICT}"));
    ensure!(again.status != 0 && conflict, "a write of a fenced host: {}", again.text);
    victim.ok("dd if=$DISK of=/dev/null bs=4096 count=1")?;
    other.ok("blocks $DISK once")?;
    Ok(())
}
