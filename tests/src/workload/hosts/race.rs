//! Both hosts take one cell at the same moment: one has it, and the other one is refused.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::lab::Lab;
use super::rounds::Part;

/// The second host begins at most this much later than the first: a command of LVM takes as long.
const OFFSET_MILLIS: u64 = 600;

/// Lets both take the cell, in each round.
///
/// # Errors
/// When both have it, or neither.
pub fn race(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    lab.hosts[0].ok("blockd cell release vg/one")?;
    let (mut wins, mut slowest) = ([0_u64; 2], 0.0_f64);
    part.each(|_, rng| {
        let first = usize::from(rng.bool());
        lab.hosts[first].send("blockd cell take vg/one")?;
        // A third of all rounds at the same moment.
        let offset = if rng.u8(..3) == 0 { 0 } else { rng.u64(..OFFSET_MILLIS) };
        std::thread::sleep(Duration::from_millis(offset));
        lab.hosts[1 - first].send("blockd cell take vg/one")?;
        let mut has = [false; 2];
        for (host, has) in lab.hosts.iter_mut().zip(&mut has) {
            let answer = host.answer()?;
            slowest = slowest.max(answer.seconds);
            *has = answer.status == 0;
            let refused = answer.text.contains("held by");
            ensure!(*has || refused, "refused for another reason: {}", answer.text);
        }
        ensure!(has != [true; 2], "both hosts have the cell");
        ensure!(has != [false; 2], "neither host has the cell");
        let winner = usize::from(has[1]);
        wins[winner] += 1;
        for (number, host) in lab.hosts.iter_mut().enumerate() {
            let there = host.run("dmsetup info vg-cell--one")?.status == 0;
            ensure!(there == (number == winner), "the cell's device is on the wrong host");
        }
        // It finds the data of the winners before it, and its own writes stay.
        let volume = &mut lab.hosts[winner];
        volume.ok("attach && blocks $VOLUME verify 1 && blocks $VOLUME fill 1 && detach")?;
        volume.ok("blockd cell release vg/one").map(|_| ())
    })?;
    lab.end()?;
    let [a, b] = wins;
    Ok(format!(
        "{} rounds, one winner in each; of this run a {a}, b {b}; slowest command {slowest:.1} s",
        part.rounds
    ))
}
