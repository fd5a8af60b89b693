//! A host stands still while it writes. The other one fences it, takes its cell and writes; the
//! first goes on, and none of its writes lands.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::blocks::WRITES;
use super::lab::Lab;
use super::rounds::Part;

/// How long a host stands still at least and at most before it is fenced. After 60 s in all its
/// watchdog resets it, which a busy machine may take for the rest.
const FROZEN_MILLIS: std::ops::Range<u64> = 500..15_000;
/// A write that the disk should not take would arrive in this time.
const LATE: Duration = Duration::from_secs(1);

/// Lets one of the hosts freeze in each round; it boots again afterwards.
///
/// # Errors
/// When a byte of the frozen host lands, or it does not notice.
pub fn freeze(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    let (mut owner, mut waits, mut resets) = (0, part.waits()?, 0_u64);
    part.each(|_, rng| {
        let victim = lab.give(owner, rng)?;
        let other = 1 - victim;
        lab.hosts[victim].ok("attach && blocks $VOLUME fill")?;
        lab.hosts[victim].begin("blocks $VOLUME on", WRITES)?;
        std::thread::sleep(Duration::from_millis(rng.u64(..2_000)));
        lab.hosts[victim].running().freeze()?;
        std::thread::sleep(Duration::from_millis(rng.u64(FROZEN_MILLIS)));
        let refused = lab.hosts[other].run("blockd cell take vg/one")?;
        ensure!(refused.status != 0, "the cell of a host that is not fenced was taken");
        waits.push(lab.take_over(other)?)?;
        lab.hosts[other].ok("attach && blocks $VOLUME fill")?;
        lab.hosts[victim].running().thaw()?;
        let was_reset = lab.hosts[victim].was_reset()?;
        resets += u64::from(was_reset);
        std::thread::sleep(LATE);
        lab.hosts[other].ok("blocks $VOLUME verify && detach")?;
        owner = other;
        if !was_reset {
            lab.hosts[victim].cut()?;
        }
        lab.boot(victim)
    })?;
    lab.end()?;
    Ok(format!(
        "{} hosts frozen under load and fenced: no byte of theirs landed, {resets} were reset by \
         their watchdog in this run; takeover: {waits}",
        part.rounds
    ))
}
