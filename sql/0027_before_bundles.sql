-- What versions 0.1.1 and 0.1.2 called, which knew of no bundles (sql/functions/bundles.sql): their workers have to be gone by now.
drop function if exists waybill.claim(boolean, boolean, int, bigint);
drop function if exists waybill.hold_claims(text[], uuid[], uuid[], int[], boolean);
drop function if exists waybill.enqueue_new(text[], uuid[], float8[], boolean[]);
