//! Cells whose pool was not made, deleted or remembered when a call was interrupted.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use blockd_api::v1;
use blockd_hosts::{Cell, CellName, Coordinator as _};
use blockd_mapper::format::claim::{CLAIM_OFFSET, Claim, ClaimState};
use blockd_mapper::io::Page;

use super::tests_of_cells::{GROUP, Hosts, THIS, creation, releasing, states, taking, volumes};

pub(super) fn deletion(name: &str) -> v1::DeleteCellRequest {
    v1::DeleteCellRequest { group: GROUP.to_owned(), name: name.to_owned(), force: false }
}

fn forced_deletion(name: &str) -> v1::DeleteCellRequest {
    v1::DeleteCellRequest { force: true, ..deletion(name) }
}

/// As the making of a pool begins.
pub(super) fn write_claim(path: &Path) {
    let claim = Claim {
        pool_id: [1; 16],
        state: ClaimState::Held,
        open_id: 2,
        counter: 3,
        node: 4,
        boot_id: [5; 16],
        lock_space: 6,
        device: 7,
    };
    let mut page = Page::zeroed();
    claim.encode(&mut page);
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&page.0, CLAIM_OFFSET).unwrap();
}

/// This host has a cell that is ready for a pool, and no pool.
fn begun(hosts: &Hosts, name: &str) -> Cell {
    let (member, name) = (hosts.array.member(THIS), CellName::parse(name).unwrap());
    let cell = member.create(&name, 64 << 20).unwrap();
    member.finish(&name).unwrap();
    cell
}

#[tokio::test]
async fn a_cell_that_is_too_small_for_a_pool_is_not_made() {
    let mut hosts = Hosts::new().await;
    let small = v1::CreateCellRequest { device_bytes: 1 << 20, ..creation("one") };
    let error = hosts.this.client.create_cell(small).await.unwrap_err();
    assert!(error.message().contains("device_bytes is 1048576"), "{error}");
    assert!(states(&mut hosts.this).await.is_empty());
    // One that was made so is refused before its device is changed, and deleted.
    let (member, name) = (hosts.array.member(THIS), CellName::parse("one").unwrap());
    member.create(&name, 1 << 20).unwrap();
    let error = hosts.this.client.create_cell(creation("one")).await.unwrap_err();
    assert!(error.message().contains("size of cell one is 1048576"), "{error}");
    assert!(hosts.this.client.delete_cell(deletion("one")).await.unwrap().into_inner().changed);
}

#[tokio::test]
async fn a_call_that_only_finishes_cells_makes_none() {
    let mut hosts = Hosts::new().await;
    let finishing = v1::CreateCellRequest { only_begun: true, ..creation("one") };
    let error = hosts.this.client.create_cell(finishing.clone()).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::NotFound, "{error}");
    assert!(states(&mut hosts.this).await.is_empty());
    begun(&hosts, "one");
    assert!(hosts.this.client.create_cell(finishing).await.unwrap().into_inner().changed);
}

#[tokio::test]
async fn a_cell_with_the_claim_of_a_pool_that_was_not_made_is_made_or_deleted() {
    let mut hosts = Hosts::new().await;
    for name in ["one", "two"] {
        write_claim(&begun(&hosts, name).path);
    }
    let error = hosts.this.client.take_cell(taking("one", false)).await.unwrap_err();
    assert!(error.message().contains("`blockd cell create` finishes it"), "{error}");
    hosts.create("one").await;
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v"]);
    assert!(hosts.this.client.release_cell(releasing("two")).await.unwrap().into_inner().changed);
    assert!(hosts.this.client.delete_cell(deletion("two")).await.unwrap().into_inner().changed);
}

#[tokio::test]
async fn a_cell_without_a_pool_is_made_or_deleted_by_any_host() {
    let mut hosts = Hosts::new().await;
    for name in ["one", "two"] {
        begun(&hosts, name);
        let request = v1::HandOverCellRequest {
            group: GROUP.to_owned(),
            name: name.to_owned(),
            host: 2,
            only_unused: true,
        };
        assert!(hosts.this.control.hand_over(request).await.unwrap());
        let error = hosts.other.client.take_cell(taking(name, false)).await.unwrap_err();
        assert!(error.message().contains("`blockd cell create` finishes it"), "{error}");
        let free = (name.to_owned(), v1::CellState::Free, 0);
        assert!(states(&mut hosts.other).await.contains(&free));
    }
    assert!(hosts.other.client.create_cell(creation("one")).await.unwrap().into_inner().changed);
    assert!(hosts.other.client.delete_cell(deletion("two")).await.unwrap().into_inner().changed);
    // One with a pool is neither, and stays free.
    hosts.other.client.release_cell(releasing("one")).await.unwrap();
    let error = hosts.this.client.create_cell(creation("one")).await.unwrap_err();
    assert!(error.message().contains("cell one exists: `blockd cell take` opens it"), "{error}");
    let error = hosts.this.client.delete_cell(deletion("one")).await.unwrap_err();
    assert!(error.message().contains("not held by this host"), "{error}");
    let free = ("one".to_owned(), v1::CellState::Free, 0);
    assert_eq!(states(&mut hosts.this).await, [free]);
}

#[tokio::test]
async fn a_repeated_call_remembers_the_pool_that_the_first_one_could_not() {
    let mut hosts = Hosts::new().await;
    let file = hosts.this.folder.path().join("pools.json.next");
    for makes in [true, false] {
        // The list can be read, and not be replaced.
        std::fs::create_dir(&file).unwrap();
        for is_in_the_way in [true, false] {
            if !is_in_the_way {
                std::fs::remove_dir(&file).unwrap();
            }
            let called = match makes {
                true => hosts.this.client.create_cell(creation("one")).await.map(drop),
                false => hosts.this.client.take_cell(taking("one", false)).await.map(drop),
            };
            let open = ("one".to_owned(), v1::CellState::Open, 1);
            assert_eq!(states(&mut hosts.this).await, [open]);
            assert_eq!(called.is_err(), is_in_the_way, "{called:?}");
        }
        let remembered = hosts.this.control.remembered_pools().unwrap();
        assert_eq!(remembered.len(), 1, "a repeated call remembers nothing");
        hosts.this.client.release_cell(releasing("one")).await.unwrap();
    }
}

#[tokio::test]
async fn a_cell_whose_deletion_stopped_in_the_erasure_is_made_or_deleted_by_any_host() {
    for makes in [true, false] {
        let mut hosts = Hosts::new().await;
        hosts.create("one").await;
        hosts.array.before("remove one", || false);
        hosts.this.client.delete_cell(forced_deletion("one")).await.unwrap_err();
        // The erasure begins with the superblocks, and may not have come to the rest of the ends.
        let cell = hosts.array.member(THIS).cells().unwrap().remove(0);
        let file = std::fs::File::options().write(true).open(&cell.path).unwrap();
        file.write_all_at(b"a part of the log", 128 << 10).unwrap();
        let released = hosts.this.client.release_cell(releasing("one")).await.unwrap();
        assert!(released.into_inner().changed);
        let error = hosts.other.client.take_cell(taking("one", false)).await.unwrap_err();
        assert!(error.message().contains("`blockd cell create` finishes it"), "{error}");
        let client = &mut hosts.other.client;
        let changed = match makes {
            true => client.create_cell(creation("one")).await.unwrap().into_inner().changed,
            false => client.delete_cell(deletion("one")).await.unwrap().into_inner().changed,
        };
        assert!(changed);
    }
}

#[tokio::test]
async fn a_deletion_that_can_not_mark_its_cell_erases_nothing() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.array.before("mark one", || false);
    let error = hosts.this.client.delete_cell(forced_deletion("one")).await.unwrap_err();
    assert!(error.message().contains("was not erased: `blockd cell take` opens it"), "{error}");
    hosts.this.client.take_cell(taking("one", false)).await.unwrap();
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v"]);
}

#[tokio::test]
async fn a_pool_whose_deletion_had_begun_is_not_imported() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let name = "one".to_owned();
    let export = v1::ExportPoolRequest { name: name.clone(), force: false };
    hosts.this.client.export_pool(export).await.unwrap();
    let member = hosts.array.member(THIS);
    member.mark_new(&CellName::parse("one").unwrap()).unwrap();
    let paths = vec![member.cells().unwrap()[0].path.display().to_string()];
    let import = v1::ImportPoolRequest { name, paths };
    let error = hosts.this.client.import_pool(import).await.unwrap_err();
    assert!(error.message().contains("`blockd cell create` finishes it"), "{error}");
    hosts.create("one").await;
}

#[tokio::test]
async fn a_cell_that_no_host_has_is_deleted_with_its_pool_by_force_alone() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let error = hosts.other.client.delete_cell(forced_deletion("one")).await.unwrap_err();
    assert!(error.message().contains("not held by this host"), "{error}");
    hosts.this.client.release_cell(releasing("one")).await.unwrap();
    let error = hosts.other.client.delete_cell(deletion("one")).await.unwrap_err();
    assert!(error.message().contains("not held by this host"), "{error}");
    let deleted = hosts.other.client.delete_cell(forced_deletion("one")).await.unwrap();
    assert!(deleted.into_inner().changed);
    assert!(states(&mut hosts.this).await.is_empty());
}
