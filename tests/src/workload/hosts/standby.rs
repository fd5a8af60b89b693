//! A volume is a block device on both hosts, and its cell goes to the one that asks for a block:
//! with its devices open all the while, and everything that was answered there.

use anyhow::{Result, ensure};

use super::lab::Lab;
use super::rounds::Part;

/// The first request of the other host's client.
const READ: &str = "dd if=$VOLUME of=/dev/null bs=4096 count=1 iflag=direct 2>/dev/null";

/// A flush, and nothing else.
const FLUSH: &str = "dd if=/dev/null of=$VOLUME conv=fsync,notrunc 2>/dev/null";

/// Has the other host's device read what this one's has written, once in each round.
///
/// # Errors
/// When a write that was answered is gone, or a mounted device was handed over.
pub fn standby(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    lab.hosts[0].ok("attach")?;
    // The kernel looks for partitions, which must not fetch the cell.
    lab.hosts[1].ok("blockd cell standby --ublk vg/one vol && [ -b $VOLUME ]")?;
    let cells = lab.hosts[0].ok("blockd --json cell list")?;
    ensure!(cells.contains("\"open\""), "a device on standby has fetched the cell: {cells}");
    let (mut owner, mut waits) = (0, part.waits()?);
    part.each(|round, _| {
        // Each round writes other bytes, without a flush at the end.
        let stamp = round + 1;
        lab.hosts[owner].ok(&format!("blocks $VOLUME write {stamp}"))?;
        owner = 1 - owner;
        waits.push(lab.hosts[owner].seconds(READ)?)?;
        lab.hosts[owner].ok(&format!("blocks $VOLUME verify {stamp}"))?;
        lab.hosts[1 - owner].ok(FLUSH)?;
        let cells = lab.hosts[owner].ok("blockd --json cell list")?;
        ensure!(cells.contains("\"open\""), "a flush has fetched the cell: {cells}");
        Ok(())
    })?;
    // Its cache would not see what the other host writes.
    lab.hosts[owner].ok("mkfs.ext4 -q $VOLUME && mkdir -p /mnt && mount $VOLUME /mnt")?;
    let refused = lab.hosts[1 - owner].ok("! blockd cell handover vg/one 2>&1")?;
    ensure!(refused.contains("mounted at /mnt"), "a mounted device was handed over: {refused}");
    lab.hosts[owner].ok("umount /mnt")?;
    lab.hosts[1 - owner].ok("blockd cell handover vg/one")?;
    lab.end()?;
    Ok(format!(
        "{} hand-overs to the one that asks, every answered write there; the first request: \
         {waits}",
        part.rounds
    ))
}
