//! Takeovers that are interrupted, by a loss of power of the host that takes or by another host.

use super::tests_of_cells::{Hosts, taking, volumes};

#[tokio::test]
async fn a_takeover_goes_on_after_a_boot_of_the_host_that_takes() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.create("two").await;
    for (cell, has_lease) in [("one", true), ("two", false)] {
        hosts.die(cell).await;
        // Its power fails before it has the lease, or before it has opened the pool.
        let array = hosts.array.clone();
        hosts.array.before(&format!("take {cell}"), move || {
            if has_lease {
                array.before("keys", || false);
            }
            has_lease
        });
        let error = hosts.other.client.take_cell(taking(cell, true)).await.unwrap_err();
        assert!(error.message().contains("was made to fail"), "{error}");
        hosts.boot_other().await;
        hosts.other.client.take_cell(taking(cell, false)).await.unwrap();
        assert_eq!(volumes(&mut hosts.other, cell).await, ["v"]);
        let group = hosts.other.control.group(super::tests_of_cells::GROUP).unwrap();
        assert!(group.member().taking(&super::cells::cell_name(cell).unwrap()).is_none());
    }
}
