//! The lock manager of a host dies. Writes to its cells go on as fast as before in the space that
//! they have, wait for more, and go on when the lock manager is back.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::lab::Lab;
use super::machine::Machine;
use super::rounds::Part;

/// Written to a cell that has 64 MiB and can grow.
const WRITE: &str =
    "dd if=/dev/zero of=/dev/blockd/away/big bs=1M count=160 conv=fsync 2>/dev/null";
/// The lock manager stays away for at least and at most this long.
const AWAY_MILLIS: std::ops::Range<u64> = 5_000..30_000;

/// Kills the lock manager of a host.
const KILL: &str = "kill -9 $(pidof lvmlockd)";

/// Takes the lock manager of one of the hosts away, in each round.
///
/// # Errors
/// When a write fails, the cell does not grow afterwards, or another cell can't be handed over.
pub fn coordinator_away(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    let (slices, seconds) = part.run.either((1, 10), (10, 60));
    let speed = at_speed(&mut lab.hosts[0], slices, seconds)?;
    // The first call about the cell since then: its lease goes with it.
    lab.hosts[0].ok("blockd cell release vg/one")?;
    lab.hosts[1].ok("blockd cell take vg/one")?;
    let (mut waited, mut owner) = (0, 1);
    part.each(|_, rng| {
        let host = &mut lab.hosts[usize::from(rng.bool())];
        host.ok("blockd cell create --size 64M vg/away")?;
        host.ok("blockd add --ublk --pool away --size 512M big")?;
        host.ok(KILL)?;
        host.send(&format!("({WRITE}; echo $? >/tmp/wrote) &"))?;
        host.answer()?;
        std::thread::sleep(Duration::from_millis(rng.u64(AWAY_MILLIS)));
        let refused = host.run("blockd cell create --size 64M vg/more")?;
        ensure!(refused.status != 0, "a cell was made without a lock manager");
        waited += u64::from(host.run("[ -e /tmp/wrote ]")?.status != 0);
        host.ok("lock_manager")?;
        host.ok("while ! [ -e /tmp/wrote ]; do sleep 0.2; done")?;
        host.ok("[ $(cat /tmp/wrote) = 0 ] && rm /tmp/wrote")?;
        host.ok("blockd detach away/big && blockd cell delete --force --yes vg/away")?;
        owner = lab.give(owner, rng)?;
        Ok(())
    })?;
    lab.end()?;
    Ok(format!(
        "the lock manager was away {} times: no write failed, those of {waited} rounds of this run \
         waited until it was back; {speed}",
        part.rounds
    ))
}

/// Writes and flushes in space that a cell has, with the lock manager and without it.
fn at_speed(host: &mut Machine, slices: u32, seconds: u32) -> Result<String> {
    host.ok("blockd add --ublk --pool one --size 16M fast")?;
    let slice = |host: &mut Machine| -> Result<u32> {
        let said = host.ok(&format!("overwrite /dev/blockd/one/fast {seconds}"))?;
        Ok(said.trim().parse()?)
    };
    // Its first writes are over then.
    slice(host)?;
    let before = slice(host)?;
    host.ok(KILL)?;
    let mut during = 0;
    for _ in 0..slices {
        during += slice(host)?;
    }
    let ratio = f64::from(during) / f64::from(slices) / f64::from(before);
    ensure!(
        before > 0 && ratio > 0.5,
        "{during} writes in {slices} slices, {before} in one before"
    );
    host.ok("lock_manager && blockd del --yes one/fast")?;
    Ok(format!("without it for {} s, {ratio:.2} of the rate of writes before", slices * seconds))
}
