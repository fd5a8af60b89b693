//! `blockd vg` and `blockd cell`: pools on storage that several hosts reach.

mod cell;
mod group;
mod host;

use blockd_api::v1;
use blockd_media::error::Error;

use super::output::table::{Cell as Field, Side, Table};
use super::{Context, amount};

pub(crate) use cell::CellVerb;
pub(crate) use group::{GroupVerb, lose};
pub(crate) use host::{declare_dead, forget};

/// Splits GROUP/CELL.
fn parse(text: &str) -> Result<(String, String), Error> {
    let allowed = "GROUP/CELL, as `blockd cell list` shows it";
    let parts = text
        .split_once('/')
        .filter(|(group, cell)| !group.is_empty() && !cell.is_empty() && !cell.contains('/'));
    let (group, cell) = parts.ok_or_else(|| Error::invalid("cell", text, allowed))?;
    Ok((group.to_owned(), cell.to_owned()))
}

/// The cell of an answer. A daemon that leaves it out breaks the contract.
fn answered(cell: Option<v1::Cell>) -> Result<v1::Cell, Error> {
    cell.ok_or_else(|| Error::Unexpected {
        what: "the daemon's answer".to_owned(),
        problem: "lacks the cell".to_owned(),
    })
}

fn state(cell: &v1::Cell) -> String {
    match (cell.state(), cell.holder) {
        (v1::CellState::Elsewhere, host) if host != 0 => format!("on host {host}"),
        (state, _) => state.word().to_owned(),
    }
}

fn table(cells: &[v1::Cell], context: &Context) -> String {
    let columns = [("cell", Side::Left), ("state", Side::Left), ("size", Side::Right)];
    let mut table = Table::new(&columns);
    for cell in cells {
        let name = format!("{}/{}", cell.group, cell.name);
        let size = context.output.size(amount(cell.device_bytes));
        table.row([Field::from(name), state(cell).into(), size.into()]);
    }
    table.render(context.output.terminal())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_named_with_its_group() {
        assert_eq!(parse("san/vm-1").unwrap(), ("san".to_owned(), "vm-1".to_owned()));
        for text in ["", "vm-1", "/vm-1", "san/", "san/vm/1"] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains("must be GROUP/CELL"), "{error}");
        }
    }
}
