//! The lock manager of a host dies while one of its cells is written full. Writes go on in the
//! space that the cell has, wait for more, and go on when the lock manager is back.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::lab::Lab;
use super::rounds::Part;

/// Written to a cell that has 64 MiB and can grow.
const WRITE: &str =
    "dd if=/dev/zero of=/dev/blockd/away/big bs=1M count=160 conv=fsync 2>/dev/null";
/// The lock manager stays away for at least and at most this long.
const AWAY_MILLIS: std::ops::Range<u64> = 5_000..30_000;

/// Takes the lock manager of one of the hosts away, in each round.
///
/// # Errors
/// When a write fails, or the cell does not grow afterwards.
pub fn coordinator_away(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run)?;
    lab.serve()?;
    let mut waited = 0;
    part.each(|_, rng| {
        let host = &mut lab.hosts[usize::from(rng.bool())];
        host.ok("blockd cell create --size 64M vg/away")?;
        host.ok("blockd add --ublk --pool away --size 512M big")?;
        host.ok("kill -9 $(pidof lvmlockd)")?;
        host.send(&format!("({WRITE}; echo $? >/tmp/wrote) &"))?;
        host.answer()?;
        std::thread::sleep(Duration::from_millis(rng.u64(AWAY_MILLIS)));
        let refused = host.run("blockd cell create --size 64M vg/more")?;
        ensure!(refused.status != 0, "a cell was made without a lock manager");
        waited += u64::from(host.run("[ -e /tmp/wrote ]")?.status != 0);
        host.ok("lock_manager")?;
        host.ok("while ! [ -e /tmp/wrote ]; do sleep 0.2; done")?;
        host.ok("[ $(cat /tmp/wrote) = 0 ] && rm /tmp/wrote")?;
        host.ok("blockd detach away/big && blockd cell delete --force --yes vg/away").map(|_| ())
    })?;
    lab.end()?;
    Ok(format!(
        "the lock manager was away {} times: no write failed, those of {waited} rounds of this run \
         waited until it was back",
        part.rounds
    ))
}
