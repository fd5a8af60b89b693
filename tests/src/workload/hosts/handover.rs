//! A cell goes from host to host while it is written between: everything that was answered is
//! there, flushed or not.

use anyhow::Result;

use super::lab::Lab;
use super::rounds::Part;

/// Hands the cell over, once in each round.
///
/// # Errors
/// When a write that was answered is gone, or the new host has waited for the one that gave the
/// cell.
pub fn handover(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    let (mut owner, mut waits) = (0, part.waits()?);
    part.each(|round, _| {
        // Each round writes other bytes, without a flush at the end.
        let stamp = round + 1;
        lab.hosts[owner].ok(&format!("attach && blocks $VOLUME write {stamp} && detach"))?;
        let released = lab.hosts[owner].seconds("blockd cell release vg/one")?;
        owner = 1 - owner;
        let taken = lab.hosts[owner].seconds("blockd cell take vg/one")?;
        waits.push(released + taken)?;
        lab.hosts[owner].ok("unwaited")?;
        lab.hosts[owner].ok(&format!("attach && blocks $VOLUME verify {stamp} && detach"))?;
        Ok(())
    })?;
    lab.end()?;
    Ok(format!(
        "{} hand-overs, every answered write there; release and take together: {waits}",
        part.rounds
    ))
}
