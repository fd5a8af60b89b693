//! A host loses its cable while it writes, in half of the rounds while it has the lock of the whole
//! group. The other one fences it and takes its cell; the cable comes back, and no write lands.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::blocks::WRITES;
use super::lab::Lab;
use super::rounds::Part;

/// Takes the lock of the group again and again: it is held nearly all the time.
const LOCKING: &str = "(while vgchange --addtag busy vg && vgchange --deltag busy vg; do :; done) \
                       >/dev/null 2>&1 &";
/// A host has no cable for at least this long before another one asks for its cell, and at most.
const CUT_MILLIS: std::ops::Range<u64> = 200..10_000;
/// A write that the disk should not take would arrive in this time.
const LATE: Duration = Duration::from_secs(1);

/// Takes the cable of one of the hosts out in each round; it boots again afterwards.
///
/// # Errors
/// When a byte of that host lands, or it does not notice.
pub fn link(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    let (mut owner, mut slowest, mut resets) = (0, [0.0_f64; 2], 0_u64);
    part.each(|_, rng| {
        let victim = lab.give(owner, rng)?;
        let (other, locks) = (1 - victim, rng.bool());
        lab.hosts[victim].ok("attach && blocks $VOLUME fill")?;
        if locks {
            lab.hosts[victim].ok(LOCKING)?;
        }
        lab.hosts[victim].begin("blocks $VOLUME on", WRITES)?;
        std::thread::sleep(Duration::from_millis(rng.u64(..2_000)));
        // The array is the network's first port.
        lab.network.cut(victim + 1, true);
        std::thread::sleep(Duration::from_millis(rng.u64(CUT_MILLIS)));
        let refused = lab.hosts[other].run("blockd cell take vg/one")?;
        ensure!(refused.status != 0, "the cell of a host that is not fenced was taken");
        let taken = lab.take_over(other)?;
        slowest[usize::from(locks)] = taken.max(slowest[usize::from(locks)]);
        lab.hosts[other].ok("attach && blocks $VOLUME fill")?;
        lab.network.cut(victim + 1, false);
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
    let [without, with] = slowest;
    Ok(format!(
        "{} hosts without a cable were fenced: no byte of theirs landed, {resets} were reset by \
         their watchdog in this run; slowest takeover {without:.1} s, of one that had the group's \
         lock {with:.1} s",
        part.rounds
    ))
}
